"""FusedAdam, FusedSGD and the multi-tensor functions, for megatron-core's optimizers, gradient norm and clipping."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from swift_megatron_grpo.platforms.cpu.stand_in import reject_unsupported

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP16_RANGE = torch.finfo(torch.float16).max / 2


def _unless_float(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype in _FLOATS else dtype


class FusedAdam(Optimizer):
    """Adam and AdamW in fp32 arithmetic. `step` is stored in the parameter group, as Megatron's checkpoints expect.

    States can be stored in bf16, or in fp16 with a scale per tensor. `master_weights` stores a wider copy of every
    16-bit parameter; with `store_param_remainders` only the low 16 bits of the fp32 master of a bf16 parameter.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        reject_unsupported(
            "FusedAdam",
            amsgrad=amsgrad,
            capturable=capturable,
            master_weight_dtype=_unless_float(master_weight_dtype),
            exp_avg_dtype=_unless_float(exp_avg_dtype),
            exp_avg_sq_dtype=_unless_float(exp_avg_sq_dtype),
            set_grad_none=set_grad_none is not None,
        )
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype,
        }  # fmt: skip
        self.capturable = capturable
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # scales of fp16 states
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.use_decoupled_grad:
            reject_unsupported("FusedAdam.zero_grad", decoupled_gradients_of_zeros=not set_to_none)
            for parameter in self._parameters():
                parameter.decoupled_grad = None  # type: ignore[attr-defined]
        else:
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:  # type: ignore[override]
        reject_unsupported("FusedAdam.step", closure=closure is not None, grad_scaler=grad_scaler is not None)
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                grad = vars(parameter).get("decoupled_grad") if self.use_decoupled_grad else parameter.grad
                if grad is not None:
                    self._update(parameter, grad.float(), group)

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            self.initialize_state(parameter)
        beta1, beta2 = group["betas"]
        step, decay = group["step"], group["weight_decay"]
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        weight = self._master(parameter)
        if not self.adam_w_mode:
            grad = grad.add(weight, alpha=decay)
        mean = self._read(parameter, "exp_avg").lerp_(grad, 1 - beta1)
        square = self._read(parameter, "exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (mean / correction1).div_((square / correction2).sqrt_().add_(group["eps"]))
        if self.adam_w_mode:
            update.add_(weight, alpha=decay)
        weight.add_(update, alpha=-group["lr"])
        self._write(parameter, "exp_avg", mean)
        self._write(parameter, "exp_avg_sq", square)
        self._set_master(parameter, weight)

    # States: "exp_avg", "exp_avg_sq" and, with master weights, "master_param", in the configured dtypes.

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=self.name_to_dtype_map[name])
        if self.master_weights:
            self.state[param]["master_param"] = torch.zeros_like(
                param, dtype=torch.int16 if self._has_remainder(param) else self.name_to_dtype_map["master_param"]
            )
            if not self._has_remainder(param):
                self._write(param, "master_param", param.detach().float())

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return a state in fp32, or a remainder as stored."""
        if state_name == "master_param" and self._has_remainder(param):
            remainder: torch.Tensor = self.state[param][state_name]
            return remainder
        return self._read(param, state_name)

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        if state_name not in self.state[param]:
            self.initialize_state(param)
        if state_name == "master_param" and self._has_remainder(param):
            self.state[param][state_name].copy_(unscaled_state)
        else:
            self._write(param, state_name, unscaled_state.float())

    def state_dict(self) -> dict[str, Any]:
        """Return the state with all tensors in fp32, so that a run can resume with other dtypes."""
        state_dict = super().state_dict()
        for parameter, index in self._indices(state_dict):
            if index in state_dict["state"]:
                names = list(state_dict["state"][index])
                state_dict["state"][index] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})  # torch would cast the states to the parameter's dtype
        for parameter, index in self._indices(state_dict):
            if index not in state_dict["state"]:  # an empty entry would make Megatron load states into it
                continue
            self.state[parameter] = {}
            for name, value in state_dict["state"][index].items():
                if value is not None:
                    self.set_scaled_state(parameter, name, value)

    def _indices(self, state_dict: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        return list(zip(self._parameters(), saved, strict=True))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _read(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        state: torch.Tensor = self.state[parameter][name]
        scale = self._scales.get(parameter, {}).get(name)
        return state.float() if scale is None else state.float().mul_(scale)

    def _write(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        state = self.state[parameter][name]
        if state.dtype == torch.float16:
            scale = value.abs().amax() / _FP16_RANGE
            self._scales.setdefault(parameter, {})[name] = scale
            value = torch.where(scale > 0, value / scale, 0.0)
        state.copy_(value)

    # Masters. A bf16 parameter is its fp32 master, rounded; a remainder is the lower half of the master.

    def _has_remainder(self, parameter: torch.Tensor) -> bool:
        return self.store_param_remainders and parameter.dtype == torch.bfloat16

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the fp32 master, which the caller updates in place: the parameter itself if it is fp32."""
        if "master_param" not in self.state[parameter]:
            return parameter.detach().float()
        if not self._has_remainder(parameter):
            return self._read(parameter, "master_param")
        low: torch.Tensor = self.state[parameter]["master_param"]
        high = parameter.detach().view(torch.int16) - (low < 0).to(torch.int16)  # undo the rounding up
        return ((high.int() << 16) | (low.int() & 0xFFFF)).view(torch.float32)

    def _set_master(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        if self._has_remainder(parameter):
            bits = master.view(torch.int32)
            low = (bits & 0xFFFF).to(torch.int16)
            parameter.view(torch.int16).copy_((bits >> 16).to(torch.int16) + (low < 0).to(torch.int16))
            self.state[parameter]["master_param"].copy_(low)
            return
        if "master_param" in self.state[parameter]:
            self._write(parameter, "master_param", master)
        parameter.copy_(master)


class FusedSGD(torch.optim.SGD):
    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        reject_unsupported("FusedSGD", wd_after_momentum=wd_after_momentum, set_grad_none=set_grad_none is not None)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all tensors, [1], and the norm of each tensor, [n] ([0] unless per_tensor).

    The kernel adds fp32 numbers chunk by chunk. On a CPU torch adds a whole tensor in one go, which is 5e-5 off for 3
    million numbers, so this adds in fp64.
    """
    norms = torch.zeros(len(tensor_lists[0]), dtype=torch.float64)
    for index, tensor in enumerate(tensor_lists[0]):
        norms[index] = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return torch.linalg.vector_norm(norms).float().view(1), norms.float() if per_tensor else torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Write sources times scale to targets; set the flag to 1 if a source is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
