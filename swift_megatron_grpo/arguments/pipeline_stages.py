"""The pipeline stages that --pipeline_model_parallel_layout describes: E|t*3|(tt|)*2 and so on, in Megatron's notation.

E: the embedding, t: a layer, L: the output layer and the loss, |: the end of a stage, x*n and (...)*n: n times.
"""

from __future__ import annotations

from swift_megatron_grpo.settings.layout import parse_stages

FLAG = "pipeline_model_parallel_layout"


def virtual_stages(layout: str, pipeline_size: int) -> int:
    """Return the stages of every pipeline rank, which Megatron calls the virtual pipeline size."""
    return max(1, len(parse_stages(layout)) // max(1, pipeline_size))


def check_stages(layout: str, pipeline_size: int, layers: int | None, name: str) -> None:
    """Raise ValueError unless the stages hold the whole model, and every pipeline rank has equally many stages.

    `layers`: of the model with this name; None: unknown.
    """
    stages = parse_stages(layout)
    parts = "".join(stages)
    problem = None
    if set(parts) - set("EtL"):
        problem = f"has parts other than E, t and L: {' '.join(sorted(set(parts) - set('EtL')))}"
    elif not (stages[0].startswith("E") and stages[-1].endswith("L") and parts.count("E") == parts.count("L") == 1):
        problem = "must begin with E, the embedding, and end with L, the output layer"
    elif layers is not None and parts.count("t") != layers:
        problem = f"has {parts.count('t')} layers (t), and {name} has {layers}"
    elif len(stages) % pipeline_size:
        problem = (
            f"has {len(stages)} stages, which must be a multiple of pipeline_model_parallel_size ({pipeline_size})"
        )
    if problem is not None:
        example = "Et*3|t*5L" if layers is None or layers < 2 else f"Et*{layers // 2}|t*{layers - layers // 2}L"
        raise ValueError(
            f"--{FLAG} {layout}: it {problem}; use --{FLAG} '{example}' with --pipeline_model_parallel_size 2, or "
            "leave it out for equal stages"
        )
