"""verl's update of the actor on a CPU: its engine, its loss, a model that is not sharded."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

FIELDS = ("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask")
FIELDS = (*FIELDS, "old_log_probs", "advantages")


class CpuEngine(transformer_impl.FSDPEngineWithLMHead):
    """With what verl's `__init__` and `initialize` set for a GPU."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.engine_config, self.optimizer_config = None, SimpleNamespace(clip_grad=1.0)
        self.use_ulysses_sp, self.ulysses_sequence_parallel_size = False, 1
        self.ulysses_device_mesh, self.pad_to_length = None, False
        self._autocast_dtype, self._qat_enabled = torch.float32, False


@dataclass(frozen=True)
class LossRow:
    """What verl's policy loss got for a sequence."""

    ids: list[int]
    first: int
    """Where the response begins."""
    mask: list[bool]
    """Over the response, as the lists below."""
    old_logprobs: list[float]
    logprobs: list[float]
    advantages: list[float]


class Actor:
    """A model that verl's `train_batch` updates with verl's `ppo_loss` and its policy loss."""

    def __init__(self, model: Path, config: DictConfig) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.temperature = config.actor_rollout_ref.rollout.temperature
        self.rows: list[LossRow] = []

    def update(self, data: TensorDict, micro_batch_size: int) -> None:
        """Make one step on a batch of verl's queue; `rows` get what the loss saw."""
        data = data.select(*FIELDS)
        settings = {
            "temperature": self.temperature,
            "global_batch_size": len(data),
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": micro_batch_size,
        }
        tensordict_utils.assign_non_tensor(data, **settings)
        on_cpu = mock.patch.object(transformer_impl, "get_device_id", return_value="cpu")
        with tempfile.TemporaryDirectory() as folder, on_cpu:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )
            try:
                CpuEngine(self.module).train_batch(data, self.loss)
            finally:
                torch.distributed.destroy_process_group()

    def loss(self, model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        """verl's loss, whose policy loss is watched."""
        vanilla = core_algos.get_policy_loss_fn("vanilla")

        def watched(**got: Any) -> Any:
            columns = (got[n] for n in ("response_mask", "old_log_prob", "log_prob", "advantages"))
            for at, values in enumerate(zip(*columns, strict=True)):
                ids, size = data["input_ids"][at].tolist(), len(data["responses"][at])
                mask, *floats = (column[:size].tolist() for column in values)
                assert not any(values[0][size:].tolist()), "padding is not trained"
                self.rows.append(LossRow(ids, len(ids) - size, mask, *floats))
            return vanilla(**got)

        with mock.patch.dict(core_algos.POLICY_LOSS_REGISTRY, vanilla=watched):
            return ppo_loss(self.config, model_output, data, dp_group)
