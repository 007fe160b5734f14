"""Real megatron-core and mcore-bridge on the CPU platform: every layout matches one rank; the logits match HF's.

One run of two ranks does all cases: first each rank alone, in a world of one, then both, with Megatron's groups
destroyed and created between the cases. This file is also the script that makes the models, and that the ranks run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import selected
from tests.forking.client import run_script

VOCABULARY, MICRO_BATCHES, LENGTHS = 264, 4, (16, 24, 8)


@dataclass(frozen=True)
class Case:
    name: str
    model: str = "dense"
    sizes: dict[str, int] = field(default_factory=dict)  # arguments of initialize_model_parallel and of ModelConfig
    config: dict[str, Any] = field(default_factory=dict)  # of ModelConfig alone
    distributed_optimizer: bool = False


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
CASES = [
    Case("tp2", sizes=TP2),
    Case("tp2-sp", sizes=TP2, config=SP),
    Case("tp2-sp-recompute", sizes=TP2, config={**SP, **RECOMPUTE}),
    Case("pp2", sizes=PP2),
    Case("pp2-vpp2", sizes={**PP2, "virtual_pipeline_model_parallel_size": 2}, config=INTERLEAVED),
    Case("cp2", sizes={"context_parallel_size": 2}),
    Case("dp2-distributed-optimizer-overlap", distributed_optimizer=True),
    Case("moe-ep2", "moe", sizes={"expert_model_parallel_size": 2}),
    Case("moe-tp2-sp-etp2", "moe", sizes={**TP2, "expert_tensor_parallel_size": 2}, config=SP),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    names = [name for (name,) in selected(request, "name")]
    folder = tmp_path_factory.mktemp("layouts")
    run_script(Path(__file__), "models", folder)  # with transformers alone: mcore-bridge replaces its RoPE initialiser
    run_script(Path(__file__), "ranks", folder, *names, ranks=2, kind="upstream")
    return json.loads((folder / "results.json").read_text())


@pytest.mark.dist
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_layout_trains_like_one_rank(results: dict[str, Any], name: str) -> None:
    differences = results[name]
    assert differences["loss"] < 1e-6
    assert differences["grad_norm"] < 1e-6  # relative
    assert differences["weights"] < 1e-6


@pytest.mark.dist
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("layout", ["packed", "batch"])
def test_logits_match_transformers(results: dict[str, Any], model: str, layout: str) -> None:
    assert results[f"logits-{model}"][layout] < 1e-5


# ---------------------------------------------------------------------------------------------------- the ranks' script


@dataclass
class Outcome:
    """Results of two optimizer steps."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)  # HF name -> tensor

    def difference(self, other: Outcome) -> dict[str, float]:
        pairs = zip(self.grad_norms, other.grad_norms, strict=True)
        return {
            "loss": max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)),
            "grad_norm": max(abs(a - b) / b for a, b in pairs),
            "weights": max((self.weights[name] - other.weights[name]).abs().max().item() for name in other.weights),
        }


def save_models(folder: Path) -> None:
    """Save two tiny models, and their logits of separate sequences and of one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    torch.manual_seed(0)
    models = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**shape)).eval(),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, router_aux_loss_coef=0.0)).eval(),
    }
    ids = micro_batch(0)[0]
    for name, model in models.items():
        model.save_pretrained(folder / name)
        with torch.no_grad():
            separate = torch.cat([model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
            torch.save({"packed": separate, "batch": model(ids).logits}, folder / f"{name}.pt")


def micro_batch(index: int) -> tuple[Any, ...]:
    """Return three packed sequences: ids, positions and labels [1, 48], cu_seqlens [4]."""
    import torch

    ids = torch.randint(0, 256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(100 + index))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    labels = ids.roll(-1, -1)
    labels[:, cu_seqlens[1:].long() - 1] = -100
    return ids, positions, labels, cu_seqlens


@contextmanager
def model_parallel(sizes: dict[str, int]) -> Iterator[None]:
    from mcore_bridge import set_random_seed
    from mcore_bridge.bridge import gpt_bridge
    from megatron.core import mpu

    mpu.initialize_model_parallel(**sizes)
    set_random_seed(42)
    yield
    mpu.destroy_model_parallel()
    gpt_bridge.EP_PP_GROUP = None  # created once per process, for one layout


def build(case: Case, folder: Path) -> tuple[Any, list[Any]]:
    """Return the case's ModelConfig and model chunks with the saved weights."""
    import torch
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder / case.model)
    arguments = dict(
        hf_config=hf_config, params_dtype=torch.float32, pipeline_dtype=torch.float32, bf16=False,
        gradient_accumulation_fusion=False, calculate_per_token_loss=True, batch_p2p_comm=True, overlap_p2p_comm=False,
        # Otherwise embedding and output layer are not marked tensor parallel, and the gradient norm misses shards.
        perform_initialization=True,
    )  # fmt: skip
    if case.model == "moe":
        arguments |= dict(moe_token_dispatcher_type="alltoall", moe_grouped_gemm=True, moe_aux_loss_coeff=0.0)
    config = ModelConfig(**{**hf_to_mcore_config(hf_config), **arguments, **case.sizes, **case.config})
    models = get_mcore_model(config)
    config.bridge.load_weights(models, str(folder / case.model))
    return config, models


def packed(cu_seqlens: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = max(LENGTHS)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def train(case: Case, folder: Path) -> Outcome:
    import torch.distributed as dist
    from mcore_bridge import unwrap_model
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, models = build(case, folder)
    sharded = case.distributed_optimizer
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=sharded, overlap_param_gather=sharded,
        bucket_size=20_000 if sharded else None, grad_reduce_in_fp32=True,
    )  # fmt: skip
    models = [DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0) for i, model in enumerate(models)]
    config.finalize_model_grads_func = finalize_model_grads
    if sharded:
        config.no_sync_func = models[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, adam_eps=1e-4, weight_decay=0.01, clip_grad=1.0, bf16=False,
            use_distributed_optimizer=sharded, overlap_param_gather=sharded,
        ),
        models,
    )  # fmt: skip
    ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    own = range(rank * MICRO_BATCHES // ranks, (rank + 1) * MICRO_BATCHES // ranks)

    outcome = Outcome()
    for _ in range(2):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [iter([micro_batch(index) for index in own]) for _ in models]
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(models) > 1 else batches[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(own),
            seq_length=sum(LENGTHS),
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        outcome.losses.append(mean_loss(reports))
        outcome.grad_norms.append(float(grad_norm))
    if sharded:
        models[0].disable_forward_pre_hook()  # waits for the parameters
    outcome.weights = {name: tensor.clone() for name, tensor in config.bridge.export_weights(unwrap_model(models))}
    dist.barrier()
    return outcome


def forward_step(batches: Iterator[Any], model: Any) -> Any:
    import torch
    from mcore_bridge import split_cp_inputs
    from megatron.core import mpu

    ids, positions, labels, cu_seqlens = next(batches)
    if mpu.get_context_parallel_world_size() > 1:
        ids, positions, labels = (split_cp_inputs(tensor, cu_seqlens, 1) for tensor in (ids, positions, labels))
    counts = labels != -100
    output = model(
        input_ids=ids, position_ids=positions, labels=labels.clamp(min=0), packed_seq_params=packed(cu_seqlens)
    )

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, tokens = (per_token * counts).sum(), counts.sum().int()
        return total, tokens, {"loss": torch.stack([total.detach(), tokens.float()])}

    return output, loss


def mean_loss(reports: list[dict[str, Any]]) -> float:
    """Return the mean over all ranks; tokens that tensor-parallel ranks count several times cancel out."""
    import torch
    import torch.distributed as dist

    total = torch.stack([report["loss"] for report in reports]).sum(0) if reports else torch.zeros(2)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def compare_logits(case: Case, folder: Path) -> dict[str, float]:
    import torch

    model = build(case, folder)[1][0].eval()
    ids, positions, _, cu_seqlens = micro_batch(0)
    rows = torch.arange(sum(LENGTHS))[None]
    with torch.no_grad():
        as_pack = model(input_ids=ids, position_ids=positions, packed_seq_params=packed(cu_seqlens))
        as_batch = model(input_ids=ids, position_ids=rows, attention_mask=None)
    found, expected = {"packed": as_pack, "batch": as_batch}, torch.load(folder / f"{case.model}.pt")
    return {name: (found[name][..., :VOCABULARY] - expected[name]).abs().max().item() for name in expected}


def main(folder: Path, *names: str) -> None:
    """Train the named cases with the models of `save_models`, and write results.json."""
    from swift_megatron_grpo.platforms.cpu import activate

    activate()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    references: dict[str, Outcome] = {}
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    for model in ("dense", "moe"):
        with model_parallel({}):
            results[f"logits-{model}"] = compare_logits(Case("one", model), folder)
            references[model] = train(Case("one", model), folder)
    dist.destroy_process_group()

    dist.init_process_group("nccl")
    for case in [case for case in CASES if case.name in names]:
        with model_parallel(case.sizes):
            results[case.name] = train(case, folder).difference(references[case.model])
        print(case.name, results[case.name], flush=True)
    if dist.get_rank() == 0:
        assert all(math.isfinite(loss) for outcome in references.values() for loss in outcome.losses)
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"models": save_models, "ranks": main}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
