"""Templates that encode prompts as the engine does, and open no file but those that a row or a request lists."""

from copy import copy

from swift.template import Template

from swift_megatron_grpo.data.videos import sample_once


def encoder_of(template: Template) -> Template:
    """Return a copy of a template that encodes prompts as the engine does, whatever their length."""
    encoder = copy(template)
    encoder.max_length = None
    encoder.set_mode("vllm")
    encode_as_engine(encoder)
    return encoder


def encode_as_engine(template: Template) -> None:
    """Have a template show videos as the trainer has sampled them, and leave `<img>PATH</img>` in messages as it is.

    ms-swift opens that file and shows the image. The text may be a stranger's or the policy's own. Images are what a
    row or a request has as images.
    """
    template._replace_image_tags = _leave
    sample_once(template)


def _leave(_: object) -> None: ...
