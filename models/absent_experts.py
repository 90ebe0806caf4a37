"""`AbsentExperts`: the tensors of a checkpoint that belong to experts of other ranks. Used by the loader."""

from collections.abc import Callable, Iterable

from torch import nn

from models.layers.moe import FusedMoE

_EXPERTS = ".experts."


class AbsentExperts:
    """Contains the names of tensors of one expert, however it is stored, that this rank does not hold."""

    def __init__(self, model: nn.Module, checkpoint_name: Callable[[str], str]) -> None:
        """`checkpoint_name`: what the checkpoint calls a module's parameter."""
        self.is_mixture = False
        """Whether the model has experts at all."""
        self._prefixes: set[str] = set()
        for name, module in model.named_modules():
            if isinstance(module, FusedMoE):
                self.is_mixture = True
                base = checkpoint_name(f"{name}.w13").rpartition(".")[0]
                others = set(range(module.num_experts)) - set(module.local_experts)
                self._prefixes |= {f"{base}.{expert}" for expert in others}

    def __contains__(self, name: object) -> bool:
        if not self._prefixes or not isinstance(name, str):
            return False
        base, separator, rest = name.partition(_EXPERTS)
        return f"{base}{separator}{rest.partition('.')[0]}" in self._prefixes

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of them that are absent."""
        return [name for name in names if name in self]
