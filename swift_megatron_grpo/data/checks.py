"""Refuse datasets that cannot be trained on, before a model is loaded.

ms-swift's preprocessors drop rows: they log the first ten faults, and the others would be trained.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from swift.dataset import AutoPreprocessor, MessagesPreprocessor, ResponsePreprocessor, RowPreprocessor, loader

from swift_megatron_grpo.data.files import downloaded, explained, read_file
from swift_megatron_grpo.data.images import TOOL_ROLES, with_listed_images
from swift_megatron_grpo.data.streams import Stream
from swift_megatron_grpo.runtime.replaced import replaced

logger = logging.getLogger(__name__)

_MEDIA_COLUMNS = {"images": "images", "videos": "videos", "audios": "audio"}  # of ms-swift's preprocessed rows
_RESPONSE_COLUMNS = ("text", "content", "completion")  # ms-swift reads a response from these, where users have a prompt
_ROW, _SOURCE = "row_of_source", "dataset"  # columns of a loaded row: its number in its file, and the file (ms-swift's)
_DIFFERING_TYPES = re.compile("features can't be aligned because the key (.+?) of features")  # of datasets
_RESPONSE_ROLES = ("assistant", "tool_call")
_SHOWN = 5  # rows that an error names
# Columns that ms-swift reads as a conversation, and those that it reads as the text of one message.
CONVERSATIONS = frozenset(name for name, read in MessagesPreprocessor().columns.items() if read == "messages")
TEXTS = frozenset(name for name, read in ResponsePreprocessor().columns.items() if read == "query")


def refuse_rows(dataset: Any, problems: Sequence[tuple[int, str]], fault: str, advice: str) -> None:
    """Raise ValueError if there are problems: pairs of a row's index and its fault. `advice` follows them directly."""
    if problems:
        rows = ", ".join(f"{row_name(dataset, row)} {problem}" for row, problem in problems[:_SHOWN])
        more = f", and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{len(problems)} of {len(dataset)} rows of the dataset {fault}: {rows}{more}{advice}")


def row_name(dataset: Any, row: int) -> str:
    """Return how an error names a row: by its number in its file, counted from 0, because datasets are shuffled."""
    known = [column for column in (_ROW, _SOURCE) if column in dataset.column_names]
    origin = dataset.select_columns(known)[row] if known else {}
    if origin.get(_ROW) is None:
        return f"row {row}"
    return f"row {origin[_ROW]} of {origin[_SOURCE]}" if _SOURCE in origin else f"row {origin[_ROW]}"


def without_row_numbers(dataset: Any) -> Any:
    """Return the dataset as reward functions and environments see it."""
    return dataset.remove_columns(_ROW) if _ROW in dataset.column_names else dataset


def no_prompt_column(size: int, columns: Sequence[str]) -> str:
    own = next((column for column in columns if column in _RESPONSE_COLUMNS), "<your column>")
    return (
        f"row 0 of the dataset has no messages, and neither has any other of its {size} rows: it has the columns "
        f"{', '.join(columns) or 'none'}; rename the column with the prompt to query, or map it: "
        f'--columns \'{{"{own}": "query"}}\''
    )


def check_rows(dataset: Any, takes_images: bool, takes_recordings: bool = False, takes_videos: bool = False) -> None:
    """Raise ValueError unless every row has a user turn to respond to, and no media that the model does not take."""
    columns = list(dataset.column_names)
    if len(dataset) == 0:
        raise ValueError(f"the dataset has no rows (columns: {_listed(columns)}); check --dataset")
    if "messages" not in columns:
        raise ValueError(no_prompt_column(len(dataset), columns))
    if "teacher_images" in columns:
        raise ValueError(
            "the dataset has the column teacher_images, which is not supported: a teacher sees the images of the "
            "policy; remove the column"
        )
    messages = (row["messages"] for row in dataset.select_columns("messages"))
    problems = [(row, problem) for row, given in enumerate(messages) if (problem := _problem(given, takes_images))]
    shown = ", ".join(column for column in columns if column != _ROW)
    refuse_rows(dataset, problems, "cannot be trained", f" (columns: {shown}); correct these rows, or remove them")
    takes = {"images": takes_images, "audios": takes_recordings, "videos": takes_videos}
    refused = [column for column in columns if column in _MEDIA_COLUMNS and not takes[column]]
    rows = dataset.select_columns(refused) if refused else ()
    problems = [
        (row, f"has {len(values[column])} in the column {column}")
        for row, values in enumerate(rows)
        for column in refused
        if values[column]
    ]
    kinds = " and ".join(_MEDIA_COLUMNS[column] for column in refused)
    why = ""
    if takes_images and "videos" in refused:  # GLM-V and InternVL, for which ms-swift passes files on to vLLM
        why = ": vLLM would choose frames that the trainer does not know"
    refuse_rows(
        dataset,
        problems,
        f"have media, and {kinds} cannot be trained with this model{why}",
        "; remove these rows, or remove the column to train on their text alone",
    )


def check_no_earlier_turns(dataset: Any) -> None:
    """Raise ValueError if a row has a response before its last prompt, which --loss_scale default would train."""
    problems = [
        (row, f"has {earlier}")
        for row, messages in enumerate(dataset["messages"])
        if (earlier := _earlier_turns([message["role"] for message in messages]))
    ]
    fault = "have turns of the assistant, which --loss_scale default trains although no policy of this run sampled them"
    refuse_rows(dataset, problems, fault, "; use --loss_scale last_round")


def _earlier_turns(roles: Sequence[str]) -> int:
    """Return the number of responses before the last prompt; one at the end of a row is not read."""
    asked = max((place for place, role in enumerate(roles) if role not in _RESPONSE_ROLES), default=0)
    return sum(role in _RESPONSE_ROLES for role in roles[:asked])


def check_tags(dataset: Any, column: str, tags: Sequence[str]) -> None:
    """Raise ValueError unless every row has the tag of a teacher."""
    if column not in dataset.column_names:
        shown = _listed(name for name in dataset.column_names if name != _ROW)
        raise ValueError(
            f"several teachers are told apart by the column {column} (--teacher_tag_key), and the columns are {shown}; "
            "use --teacher_tag_key with one of them"
        )
    values = dataset[column]
    wrong = [(row, f"has {tag!r:.100}") for row, tag in enumerate(values) if tag is None or str(tag) not in tags]
    advice = f" (tags of --teacher_model_server: {_listed(tags)}); add the tag to a teacher, or remove these rows"
    refuse_rows(dataset, wrong, f"have no teacher by their column {column}", advice)


def _problem(messages: list[dict[str, Any]] | None, takes_images: bool) -> str | None:
    if not messages:
        return "has no messages"
    if all(message["role"] != "user" for message in messages):
        return f"has no user turn, only {_listed(message['role'] for message in messages)}"
    contents = [message["content"] for message in messages if message["role"] not in TOOL_ROLES]
    wrong = next((content for content in contents if not isinstance(content, str | list)), None)
    if wrong is not None:
        return f"has a content of type {type(wrong).__name__}, which is neither a text nor a list of parts"
    try:
        images = with_listed_images({"messages": messages}).get("images")
    except ValueError as error:
        return str(error)
    return "has images in its messages, which this model does not accept" if images and not takes_images else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"


# ---- files that ms-swift cannot read, and rows that it drops


@contextmanager
def checked_loading(columns: Mapping[str, str] | None = None, stream: Stream | None = None) -> Iterator[None]:
    """Raise ValueError for a file that cannot be read, and for rows that ms-swift drops, with the cause.

    A preprocessor that was written for one dataset may filter its rows on purpose: it is only logged how many. The
    rows of others get their number. `columns`: --columns; each of its names must be a column of some dataset, or a
    field of one. `stream`: what is read of the datasets that ms-swift loads as streams.
    """
    preprocess, rename = RowPreprocessor.__call__, RowPreprocessor.safe_rename_columns
    choose = AutoPreprocessor._get_preprocessor
    load_file, get_hub = loader.hf_load_dataset, loader.get_hub
    columns = columns or {}
    solutions = ["solution", *(name for name, meaning in columns.items() if meaning == "solution")]
    found: set[str] = set()
    source = "the dataset"

    def first_rows(load: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
        return partial(stream.first_rows, load) if stream is not None and options["streaming"] else load

    def read(kind: str, data_files: str, **options: Any) -> Any:
        nonlocal source
        source = data_files
        return read_file(first_rows(load_file, options), kind, data_files, solutions, **options)

    def named_hub(use_hf: bool | None) -> SimpleNamespace:
        def download(name: str, *arguments: Any, **options: Any) -> Any:
            nonlocal source
            source = name
            load = first_rows(get_hub(use_hf).load_dataset, options)
            return downloaded("file", load, name, *arguments, **options)

        return SimpleNamespace(load_dataset=download)

    def rename_columns(dataset: Any, names: Mapping[str, str]) -> Any:
        found.update(column.lower() for column in dataset.column_names)
        return rename(with_fields(dataset, names), names)

    def choose_preprocessor(self: Any, dataset: Any) -> Any:
        column = column_of_messages(dataset)
        if column is None:
            return choose(self, dataset)
        return MessagesPreprocessor(columns={column: "messages"}, **self.kwargs)

    def preprocess_all(self: Any, dataset: Any, **options: Any) -> Any:
        try:
            kept = preprocess(self, dataset, **options)
        except Exception as error:  # Arrow loads text that is not UTF-8, which nothing can read
            raise explained(source, error) from error
        if self.dataset_sample is not None:
            return kept
        try:
            _check_kept(self, dataset, kept, bool(options.get("enable_auto_mapping")))
        except ValueError as fault:
            raise ValueError(f"{source}: {fault}") from None
        return _with_row_numbers(kept) if len(kept) == len(dataset) else kept

    with ExitStack() as stack:
        stack.enter_context(replaced(RowPreprocessor, "__call__", preprocess_all))
        stack.enter_context(replaced(RowPreprocessor, "safe_rename_columns", staticmethod(rename_columns)))
        stack.enter_context(replaced(AutoPreprocessor, "_get_preprocessor", choose_preprocessor))
        stack.enter_context(replaced(loader, "hf_load_dataset", read))
        stack.enter_context(replaced(loader, "get_hub", named_hub))
        try:
            yield
        except ValueError as error:
            if differing := _DIFFERING_TYPES.search(str(error)):
                raise ValueError(
                    f"the column {differing[1]} has another type in one dataset than in another; use one type, such as "
                    "text, in all of them"
                ) from error
            raise
    unknown = [name for name in columns if not {name.lower(), name.partition(".")[0].lower()} & found]
    if unknown:
        raise ValueError(
            f"--columns names {', '.join(unknown)}, and the columns are {', '.join(sorted(found))}; use one of them"
        )


def _with_row_numbers(dataset: Any) -> Any:
    return without_row_numbers(dataset).add_column(_ROW, list(range(len(dataset))))


def _check_kept(preprocessor: Any, raw: Any, kept: Any, auto_mapping: bool) -> None:
    """Raise ValueError if rows were dropped, or if they have no prompt because ms-swift takes it for the response."""
    columns = list(raw.column_names)
    prompts = [column for column in columns if column.lower() in CONVERSATIONS | TEXTS]
    is_general = isinstance(preprocessor, MessagesPreprocessor | ResponsePreprocessor)
    if not prompts and (len(kept) == 0 or (is_general and _problem(kept[0]["messages"], takes_images=True))):
        raise ValueError(no_prompt_column(len(raw), columns))
    if len(kept) == len(raw):
        return
    if not is_general:
        logger.warning(
            f"{type(preprocessor).__name__} keeps {len(kept)} of {len(raw)} rows of the dataset; the others are not "
            "trained"
        )
        return
    logging.disable(logging.WARNING)  # ms-swift's advice for every row
    try:
        dropped = [(row, _cause(raw[row], prompts, error)) for row, error in _dropped(preprocessor, raw, auto_mapping)]
    finally:
        logging.disable(logging.NOTSET)
    advice = f" (columns: {', '.join(columns)}); correct these rows, or remove them"
    refuse_rows(raw, dropped, "would not be trained", advice)


def _dropped(preprocessor: Any, raw: Any, auto_mapping: bool) -> Iterator[tuple[int, Exception | None]]:
    """Preprocess the rows again, one at a time, and yield those that are dropped, each with its error."""
    dataset = preprocessor.safe_rename_columns(raw, preprocessor.origin_columns)
    if auto_mapping:
        dataset = preprocessor.safe_rename_columns(dataset, preprocessor.columns)
    for index, row in enumerate(preprocessor.prepare_dataset(dataset)):
        batch = {column: [value] for column, value in row.items()}
        try:
            result = preprocessor.batched_preprocess(batch, strict=True, ignore_max_length_error=False)
        except Exception as error:  # whatever the row's content raises in ms-swift
            yield index, error
        else:
            if not result["messages"]:
                yield index, None


def _cause(row: dict[str, Any], prompts: Sequence[str], error: Exception | None) -> str:
    """Return why ms-swift drops the row."""
    column = next((column for column in prompts if column.lower() in CONVERSATIONS), None)
    if column is None:
        if not any(row[prompt] for prompt in prompts):
            return f"has no {', '.join(prompts)}"
        return f"raises {type(error).__name__}: {error}"
    messages = row[column]
    if not messages:
        others = [prompt for prompt in prompts if row[prompt]]
        return f"has {others[0]} but no {column}, the only column that is read" if others else f"has no {column}"
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        kind = f"a list of {type(messages[0]).__name__}" if isinstance(messages, list) else type(messages).__name__
        return f"has {column} that are {kind}, not a list of objects with role and content"
    roles = any(message.get("role") or message.get("from") for message in messages)
    contents = any(message.get("content") or message.get("value") for message in messages)
    if roles != contents:
        return f"has {column} without {'content' if roles else 'a role'}"
    return f"has wrong {column} ({type(error).__name__}: {error})"


# ---- columns that ms-swift's preprocessors do not read as they are. Rows of verl have both: `prompt` is a list of
# messages, which ms-swift takes for the text of one, and `reward_model` a dictionary with the `ground_truth`.


def column_of_messages(dataset: Any) -> str | None:
    """Return the one column that holds lists of messages under another name than ms-swift's."""
    columns = {column.lower(): column for column in dataset.column_names}
    if len(dataset) == 0 or not columns.keys().isdisjoint(CONVERSATIONS):
        return None
    row = dataset[0]
    found = [column for name, column in columns.items() if name in TEXTS and _are_messages(row[column])]
    return found[0] if len(found) == 1 else None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def with_fields(dataset: Any, columns: Mapping[str, str]) -> Any:
    """Add a column for each field that --columns names with dots, as {"column.field": "name"}; ms-swift renames it."""
    for path, name in columns.items():
        column, *fields = path.split(".")
        if not fields or path in dataset.column_names or column not in dataset.column_names:
            continue
        values = [_field(row, fields) for row in dataset[column]]
        if all(value is None for value in values):
            raise ValueError(f"--columns: no row of the dataset has {path}; its first {column} is {dataset[0][column]}")
        dataset = dataset.remove_columns([name] if name in dataset.column_names else []).add_column(path, values)
    return dataset


def _field(value: Any, fields: list[str]) -> Any:
    for field in fields:
        value = value.get(field) if isinstance(value, dict) else None
    return value
