"""What transformers says: the reference of the oracle tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]


class Reference:
    """A Qwen3.5 of transformers in f32, eager attention, one sequence with its cache."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import Qwen3_5ForConditionalGeneration
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._torch = torch
        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.delta = 0
        self._cache: Any = None

    def vision(self, pixels: Array, grid: tuple[int, int]) -> Array:
        """pixels [patches, lanes] f32 in patch order; gives image embeddings [n, hidden]."""
        torch = self._torch
        with torch.no_grad():
            found = self.model.model.visual(torch.tensor(pixels), grid_thw=torch.tensor([[1, *grid]]))
        return np.asarray(found.pooler_output)

    def prefill(self, ids: Array, pixels: Array | None = None, grid: tuple[int, int] | None = None) -> Array:
        """Logits [S, vocab]; starts a new cache. `positions` [3, S] and `delta` are set."""
        from transformers.cache_utils import DynamicCache

        torch = self._torch
        self._cache = DynamicCache(config=self.model.config.text_config)
        extra: dict[str, Any] = {}
        self.positions: Array = np.tile(np.arange(len(ids)), (3, 1))
        self.delta = 0
        tokens = torch.tensor(ids)[None]
        if pixels is not None and grid is not None:
            kinds = (tokens == self.model.config.image_token_id).long()
            sizes = torch.tensor([[1, *grid]])
            positions, delta = self.model.model.get_rope_index(tokens, kinds, image_grid_thw=sizes)
            self.positions, self.delta = positions[:, 0].numpy(), int(delta)
            extra = {"pixel_values": torch.tensor(pixels), "image_grid_thw": sizes, "mm_token_type_ids": kinds}
        with torch.no_grad():
            found = self.model(input_ids=tokens, cache=self._cache, use_cache=True, **extra)
        self._tokens = len(ids)
        return np.asarray(found.logits[0])

    def step(self, token: int) -> Array:
        """Logits [vocab] of one more token."""
        torch = self._torch
        place = torch.tensor([self._tokens] + [self._tokens + self.delta] * 3).reshape(4, 1, 1)
        with torch.no_grad():
            found = self.model(input_ids=torch.tensor([[token]]), position_ids=place, cache=self._cache, use_cache=True)
        self._tokens += 1
        return np.asarray(found.logits[0, 0])

    def states(self) -> dict[str, Array]:
        """The cache in the runtime's layout: conv without its oldest column, recurrent, KV as k0, v0, k1, v1, ..."""
        conv, recurrent, kv = [], [], []
        for kind, layer in zip(self.model.config.text_config.layer_types, self._cache.layers, strict=True):
            if kind == "linear_attention":
                conv.append(layer.conv_states[0][..., 1:].numpy())
                recurrent.append(layer.recurrent_states[0].numpy())
            else:
                kv += [layer.keys.numpy(), layer.values.numpy()]
        return {"conv": np.stack(conv), "recurrent": np.stack(recurrent), "kv": np.stack(kv)}


@pytest.fixture(scope="session")
def reference() -> Iterator[Callable[[Path], Reference]]:
    """Loads a checkpoint directory into transformers; one thread, as the tests share the machine."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_NPU_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
