"""The requests that a rollout server accepts, with the type, range and size of every field.

Nothing else reaches vLLM: a value of a wrong type can end the engine's input thread without an error. Types are strict
(neither True nor "1" is a number), numbers finite. An error names the field and does not repeat its value.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, Literal, TypeVar

from PIL import Image
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from swift_megatron_grpo.data.images import MAX_PIXELS, TOOL_ROLES, check_sent
from swift_megatron_grpo.data.recordings import check_heard
from swift_megatron_grpo.data.videos import Frames
from swift_megatron_grpo.generation.protocol.messages import MOST_IN_BATCH, Routes, description

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 32  # more than any tokenizer needs for text
_LEAST_CHARACTERS = 2**20
_INT64 = 2**63
_PROBE_IMAGE, _PROBE_PIXELS = 2**18, 2**16  # characters and pixels of the image that verifies weights
_MOST_IN_GROUP = 1024  # completions of a prompt
_LEVELS_OF_BATCH = 2  # that a batch puts around its requests
_MEDIA = re.compile(r"(image|video|audio)(_url)?")
_BASE64 = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,[A-Za-z0-9+/]+={0,2}", re.ASCII)

Items = Annotated[list[T], Field(fail_fast=True)]  # describes the first wrong element, not all
# pydantic's Literal[1] accepts True as well.
One = Annotated[int, Field(ge=1, le=1)]
Off = Annotated[bool, AfterValidator(lambda value: _false(value))]
Int32 = Annotated[int, Field(ge=0, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Host = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9.:_%-]+$")]
Port = Annotated[int, Field(ge=0, le=65535)]
Version = Annotated[int, Field(ge=-1, lt=_INT64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


@dataclass(frozen=True, slots=True)
class ContentLimits:
    nesting: int  # levels of lists and objects
    messages: int  # of one request
    prompt_characters: int
    max_model_len: int
    vocab_size: int
    accepts_media: bool  # the model has an image, video or audio part
    images: int  # of one prompt
    recordings: int = 0  # of one prompt
    videos: int = 0  # of one prompt

    def check_number(self, kind: str, number: int) -> None:
        """Raise ValueError for more media of a kind (image, audio, video) than a prompt may have."""
        limits = {"image": (self.images, "images"), "audio": (self.recordings, "recordings")}
        most, name = limits.get(kind, (self.videos, "videos"))
        if number > most:
            raise ValueError(
                f"more than {most} {name} in a prompt; start the server with a larger limit of {kind} in "
                "--vllm_limit_mm_per_prompt"
            )


def prompt_characters(flag: int | None, max_model_len: int) -> int:
    """Return the limit on the characters of one prompt: by default what can fill the engine's context."""
    return flag if flag is not None else max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * max_model_len)


class InvalidBody(ValueError):
    """The body of a request is not what its route accepts."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def leave_one_unknown_field(cls, value: Any) -> Any:
        """Leave one unknown field to refuse: pydantic would describe each of a million."""
        fields = cls.model_fields
        if cls.model_config["extra"] != "forbid" or not isinstance(value, dict) or len(value) <= len(fields):
            return value
        unknown = next(name for name in value if name not in fields)
        return {name: value[name] for name in fields if name in value} | {unknown: None}


class Sampling(Strict):
    """ms-swift's RequestConfig, as this package's trainer uses it."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: Annotated[Items[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    logprobs: bool = False
    return_details: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    # one completion, without alternatives
    n: One = 1
    best_of: One | None = None
    num_beams: One = 1
    stream: Off = False
    top_logprobs: None = None
    prompt_logprobs: None = None
    structured_outputs_regex: Annotated[str, Field(max_length=4096)] | None = None


class StockSampling(Sampling):
    """ms-swift's RequestConfig, as its own trainers use it."""

    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # type: ignore[assignment]
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None  # type: ignore[assignment]


class Message(Strict, extra="allow"):
    """One message. Datasets add keys to messages, such as `loss`; they reach the template as they are."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Any = None

    @model_validator(mode="after")
    def check_content(self, info: ValidationInfo) -> Message:
        """Check text and parts. Other extensions of ms-swift, such as lists of token ids, are refused."""
        if isinstance(self.content, list) and self.role not in TOOL_ROLES:
            for part in self.content:
                _check_part(part, _limits(info))
        elif not isinstance(self.content, str | None) and self.role not in TOOL_ROLES:
            raise ValueError("content must be a text or a list of parts")
        return self

    @property
    def media(self) -> Iterator[tuple[str, str]]:
        """Yield kind and source of each medium in the parts of the content."""
        if isinstance(self.content, list) and self.role not in TOOL_ROLES:
            for part in self.content:
                if part["type"] != "text" and (source := _source(part)) is not None:
                    yield part["type"], source


class StockPrompt(Strict):
    """ms-swift's RolloutInferRequest."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    images: Items[str] = []
    audios: Items[str] = []
    videos: Items[str] = []
    tools: Items[dict[str, Any] | str] | str | None = None
    objects: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    data_dict: dict[str, Any] = {}  # further columns of the dataset, for schedulers and environments
    uuid: Annotated[str, Field(max_length=256)] | None = None
    add_eos: bool | Literal["auto"] | None = None

    @field_validator("images", "audios", "videos")
    @classmethod
    def check_media(cls, media: list[str], info: ValidationInfo) -> list[str]:
        return [_checked_media(medium, _limits(info), str(info.field_name)) for medium in media]

    @field_validator("chat_template_kwargs")
    @classmethod
    def check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse options that templates merge into what they pass to the reader of an image."""
        if any(map(_MEDIA.fullmatch, options)):
            raise ValueError("media must be sent as base64 in `images`; paths and URLs are not opened")
        for name in ("min_pixels", "max_pixels"):
            pixels = options.get(name)
            if pixels is not None and not (isinstance(pixels, int | float) and pixels <= MAX_PIXELS):
                raise ValueError(f"{name} must be a number of at most {MAX_PIXELS}")
        return options

    @model_validator(mode="after")
    def check_size(self, info: ValidationInfo) -> StockPrompt:
        limits = _limits(info)
        if len(self.messages) > limits.messages:
            raise ValueError(f"more than {limits.messages} messages (--max_messages)")
        if self.objects and not limits.accepts_media:
            raise ValueError("objects belong to images, and this server's model takes text only")
        media = [medium for message in self.messages for medium in message.media]
        for kind, listed in (("image", self.images), ("audio", self.audios), ("video", self.videos)):
            limits.check_number(kind, len(listed) + sum(part.startswith(kind) for part, _ in media))
        contents = [[message.content, message.model_extra] for message in self.messages]
        texts = _texts([contents, self.tools, self.chat_template_kwargs])
        if sum(map(len, texts)) - sum(len(source) for _, source in media) > limits.prompt_characters:
            raise ValueError(
                f"more than {limits.prompt_characters} characters of messages and tools (--max_prompt_characters)"
            )
        return self


class Prompt(StockPrompt):
    """A prompt of this package's trainer. Its columns are JSON texts, because JSON itself excludes NaN."""

    @field_validator("data_dict", mode="before")
    @classmethod
    def decode_columns(cls, columns: Any, info: ValidationInfo) -> dict[str, Any]:
        if not isinstance(columns, dict) or not all(isinstance(text, str) for text in columns.values()):
            raise ValueError("every column must be a JSON text")
        decoded = {}
        for name, text in columns.items():
            try:
                decoded[name] = json.loads(text)
            except (ValueError, RecursionError):
                raise ValueError("a column is not valid JSON") from None
        _check_values(decoded, _limits(info).nesting, allow_nan=True)
        return decoded


class GenerateRequest(Strict):
    request: Prompt
    sampling: Sampling
    image_digests: Annotated[Items[Digest], Field(max_length=1024)] = []  # the prompt's images, which were sent before
    audio_digests: Annotated[Items[Digest], Field(max_length=1024)] = []  # the same of its recordings
    video_digests: Annotated[Items[Digest], Field(max_length=1024)] = []  # and of its videos
    experts: bool = False  # return the experts that the engine's routers choose
    weights_version: Version  # that the trainer expects
    newer_weights: bool = False  # weights of a later version may generate it as well, or a part of it
    tokens_of_all_turns: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # limit of a conversation; None: none
    group: Annotated[int, Field(ge=1, le=_MOST_IN_GROUP)] | None = None  # completions, of a scheduler that answers all

    @field_validator("image_digests", "audio_digests", "video_digests")
    @classmethod
    def check_number(cls, digests: list[str], info: ValidationInfo) -> list[str]:
        _limits(info).check_number(str(info.field_name).removesuffix("_digests"), len(digests))
        return digests


class GenerateBatch(Strict):
    requests: Annotated[Items[GenerateRequest], Field(min_length=1, max_length=MOST_IN_BATCH)]


def completions_of(body: object) -> int:
    """Return how many completions a body asks for; one without any counts as one."""
    if isinstance(body, GenerateBatch):
        return sum(map(completions_of, body.requests))
    return (isinstance(body, GenerateRequest) and body.group) or 1


class ScoreRequest(Strict):
    tokens: Items[Int32]
    image: Annotated[str, Field(max_length=_PROBE_IMAGE)] | None = None  # a PNG as base64
    recording: Annotated[str, Field(max_length=_PROBE_IMAGE)] | None = None  # a WAV as base64
    video: Annotated[str, Field(max_length=_PROBE_IMAGE)] | None = None  # frames as base64
    weights_version: Version

    @field_validator("image")
    @classmethod
    def check_image(cls, image: str | None, info: ValidationInfo) -> str | None:
        if image is not None:
            _checked_media(image, _limits(info), "a PNG")
            content = base64.b64decode(image)
            check_sent(content, _PROBE_PIXELS, formats=("PNG",))
            try:
                Image.open(BytesIO(content), formats=("PNG",)).load()
            except Exception:  # whatever PIL raises for what the header has promised
                raise ValueError("is a truncated or damaged image") from None
        return image

    @field_validator("recording", "video")
    @classmethod
    def check_recording_or_video(cls, medium: str | None, info: ValidationInfo) -> str | None:
        kind = "audio" if info.field_name == "recording" else "video"
        if medium is not None:
            _limits(info).check_number(kind, 1)
            _checked_media(medium, _limits(info), kind)
        return medium

    @field_validator("tokens")
    @classmethod
    def check_tokens(cls, tokens: list[int], info: ValidationInfo) -> list[int]:
        limits = _limits(info)
        if not 2 <= len(tokens) < limits.max_model_len:
            raise ValueError(f"needs 2 to {limits.max_model_len - 1} tokens, because of --vllm_max_model_len")
        if max(tokens) >= limits.vocab_size:
            raise ValueError(f"a token is beyond the vocabulary of {limits.vocab_size}")
        return tokens


class JoinRequest(Strict):
    host: Host  # address at which the trainer reaches this machine
    port: Port  # of the rendezvous; 0: any free port
    timeout: Annotated[float, Field(gt=0, le=86400)]


class ReceiveRequest(Strict):
    version: Annotated[int, Field(ge=0, lt=_INT64)]
    lora: bool  # an adapter on the checkpoint instead of the model's weights
    collect_checksums: bool  # the trainer will request a checksum of each tensor
    in_flight: bool = False  # requests continue with them instead of being cancelled

    @model_validator(mode="after")
    def check_in_flight(self) -> ReceiveRequest:
        if self.in_flight and self.lora:
            raise ValueError("in_flight is for the model's weights, and lora loads an adapter")
        return self


# ---- ms-swift's own routes, for ms-swift's own trainers


class StockInfer(Strict, extra="ignore"):  # ms-swift's client sends more keys
    infer_requests: Annotated[Items[StockPrompt], Field(min_length=1, max_length=65536)]
    request_config: StockSampling | None = None
    use_tqdm: bool | None = None


class StockCommunicator(Strict):
    host: Host
    port: Port
    world_size: Annotated[int, Field(ge=1, le=65536)]


class StockTensor(Strict, extra="allow"):
    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: Annotated[str, Field(pattern=r"^(torch\.)?(bfloat16|u?int(8|16|32|64)|bool|float(8_\w{1,16}|16|32|64))$")]
    shape: Annotated[Items[Int32], Field(max_length=16)]


class StockTensors(Strict, extra="allow"):
    metadatas: Items[StockTensor] = []
    lora_tensors_metadata: Items[StockTensor] = []


SCHEMAS: dict[str, type[BaseModel]] = {
    Routes.GENERATE: GenerateRequest, Routes.GENERATE_BATCH: GenerateBatch, Routes.SCORE: ScoreRequest,
    Routes.JOIN: JoinRequest, Routes.RECEIVE: ReceiveRequest,
}  # fmt: skip
STOCK_SCHEMAS: dict[str, type[BaseModel]] = {
    "/infer/": StockInfer, "/init_communicator/": StockCommunicator, "/update_named_param/": StockTensor,
    "/update_flattened_params/": StockTensors, "/update_adapter_param/": StockTensors,
    "/update_adapter_flattened_param/": StockTensors,
}  # fmt: skip


def parse(body: bytes, schema: type[B], limits: ContentLimits) -> B:
    """Return the request in the body. Raises InvalidBody, which names the field that is wrong."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from None
    try:
        _check_values(value, limits.nesting + _LEVELS_OF_BATCH * (schema is GenerateBatch))
        return schema.model_validate(value, context=limits)
    except ValidationError as error:
        raise InvalidBody(description(error)) from None
    except ValueError as error:
        raise InvalidBody(str(error)) from None


def _false(value: bool) -> bool:
    if value:
        raise ValueError("must be false")
    return value


def _limits(info: ValidationInfo) -> ContentLimits:
    assert isinstance(info.context, ContentLimits)
    return info.context


def _check_values(value: Any, nesting: int, allow_nan: bool = False) -> None:
    """Raise ValueError for values that are nested too deeply, and for numbers that no engine can represent."""
    level, depth = [value], -1
    while level:
        depth += 1
        if depth > nesting:
            raise ValueError(f"more than {nesting} levels of lists and objects (--max_nesting)")
        inner: list[Any] = []
        for item in level:
            if isinstance(item, list):
                inner += item
            elif isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, float) and not (allow_nan or math.isfinite(item)):
                raise ValueError("numbers must be finite")
            elif isinstance(item, int) and not -_INT64 <= item < _INT64:
                raise ValueError("integers must fit into 64 bits")
        level = inner


def _check_part(part: Any, limits: ContentLimits) -> None:
    """Check one part of a message's content: text or, if the model takes media, bytes as base64."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return
    if not isinstance(kind, str) or not _MEDIA.fullmatch(kind):
        raise ValueError('each part of content must be {"type": "text", "text": ...}, or an image, a video or an audio')
    source = _source(part)
    if source is not None and _checked_media(source, limits, kind) != source:
        raise ValueError("media in content must be data URIs: data:image/png;base64,...")
    if not limits.accepts_media:
        raise ValueError("this server's model takes text only")


def _source(part: dict[str, Any]) -> Any:
    """Return the medium of a part; None for a placeholder for an element of `images`, `videos` or `audios`."""
    source = part.get(part["type"])
    return source.get("url") if isinstance(source, dict) else source


def _checked_media(medium: Any, limits: ContentLimits, kind: str) -> str:
    """Return bytes that the client has sent, as a data URI: nothing that ms-swift could take for a path or a URL."""
    if not limits.accepts_media:
        raise ValueError("this server's model takes text only")
    uri = medium if isinstance(medium, str) and medium.startswith("data:") else f"data:media/base64;base64,{medium}"
    if not isinstance(medium, str) or not _BASE64.fullmatch(uri) or len(uri.partition(",")[2]) % 4:
        raise ValueError("media must be sent as base64; paths and URLs are not opened")
    if kind.startswith("image"):
        check_sent(base64.b64decode(uri.partition(",")[2]), MAX_PIXELS)
    elif kind.startswith("audio"):
        check_heard(base64.b64decode(uri.partition(",")[2]))
    elif kind.startswith("video"):
        Frames.of_file(base64.b64decode(uri.partition(",")[2]))
    return uri


def _texts(value: Any) -> Iterable[str]:
    """Yield all texts in nested values, including the keys of objects."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
