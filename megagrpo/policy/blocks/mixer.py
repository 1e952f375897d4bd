"""What our mixers for megatron-core's MambaLayer share: projections, and the state for checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar

from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from megagrpo.families.shared.recurrence import Mamba2, ShortConv


class Mixer(MegatronModule):
    """A mixer with an input projection to several parts, an output projection, and parameters of its own.

    Tensor-parallel ranks share the rows of each part and of each own parameter.
    """

    sizes: Any
    checkpoint_names: ClassVar[dict[str, str]] = {}  # own parameters -> their keys in checkpoints, where these differ

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        sizes: Mamba2 | ShortConv,
        pg_collection: Any,
        **_: Any,
    ):
        super().__init__(config)
        self.sizes, self.tp_group, self.cp_group = sizes, pg_collection.tp, pg_collection.cp
        self.rows = {part: rows // self.tp_group.size() for part, rows in sizes.rows.items()}
        linear = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(sizes.rows.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.inner,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )

    def parts(self) -> dict[str, dict[str, int]]:
        """Return the rows of each part of the parameters that hold several."""
        return {"in_proj.weight": self.rows}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        state = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        for name in own.keys() & self.checkpoint_names.keys():
            state[prefix + name].key = prefix + self.checkpoint_names[name]
        for key, rows in self.parts().items():  # so that ranks of another layout find their rows of each part
            state[prefix + key] = _split_tensor_factory(state[prefix + key], [*rows.values()], [*rows], 0)
        return state
