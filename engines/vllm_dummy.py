"""Random weights for timing and stress: normal(0, 0.02), norms 1, from a fixed seed. Registers a vLLM load format.

vLLM's own dummy weights lie within a thousandth of zero, which leaves nothing of the input after a few layers, so that
every prompt gets the same answer.
"""

from __future__ import annotations

STD = 0.02
SEED = 1234


def register() -> None:
    """Makes the load format known in this process; each worker does so for itself."""
    import torch
    from torch import nn
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from engines.vllm_config import RANDOM_WEIGHTS

    @register_model_loader(RANDOM_WEIGHTS)
    class NormalModelLoader(DummyModelLoader):  # type: ignore[misc] # vLLM's types are not followed
        """Draws each parameter from a generator of its own, in the order of the model's state."""

        def load_weights(self, model: nn.Module, model_config: object) -> None:  # noqa: ARG002 - vLLM's signature
            for index, tensor in enumerate(model.state_dict().values()):
                if not torch.is_floating_point(tensor):
                    continue
                if tensor.dim() <= 1:
                    tensor.fill_(1.0)
                    continue
                generator = torch.Generator(device=tensor.device)
                generator.manual_seed(SEED + index)
                tensor.normal_(0.0, STD, generator=generator)
