"""`--attention`: a kernel that cannot serve a run is refused with the reason; the others compute the same."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.batch import Mask
from megalite.core.ops.attention import attention
from megalite.core.ops.sdpa import KERNELS, AttentionCase, flash_version, select
from tests.parity import jobs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("cudnn", AttentionCase(CPU, BF16, 64), "it runs on CUDA GPUs, not on cpu; use auto or flash or math"),
        ("efficient", AttentionCase(CPU, torch.float32, 64), "it runs on CUDA GPUs"),
        ("flash", AttentionCase(CPU, BF16, 64, softcap=True), "computed in plain torch; use auto or math"),
        ("cudnn", AttentionCase(GPU, torch.float32, 64), "bf16 and fp16, not fp32; use auto or efficient or math"),
        (
            "flash",
            AttentionCase(GPU, BF16, 60, masked=True),
            "a mask, which it does not support; use auto or efficient",
        ),
        ("flash", AttentionCase(GPU, BF16, 512), "head sizes up to 256, not 512"),
        (
            "cudnn",
            AttentionCase(GPU, BF16, 64, deterministic=True),
            "not deterministic (--deterministic); use auto or flash",
        ),
        ("cudnn", AttentionCase(torch.device("cuda", 1), BF16, 64), "compute capability 9.0 or above, not 8.0"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, name: str, case: AttentionCase, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (8, 0))
    with pytest.raises(UserError) as caught:
        select(name, attention, case)
    assert str(caught.value).startswith(f"--attention {name}: ")
    assert reason in str(caught.value)


def test_the_kernel_is_the_one_asked_for() -> None:
    case = AttentionCase(CPU, torch.float32, 16)
    q, k, v = (torch.randn(2, n, 24, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    expected = attention(q, k, v, Mask())
    assert select("auto", attention, case) is attention
    names = {}
    for name in ("flash", "math"):
        with torch.profiler.profile() as prof:
            out = select(name, attention, case)(q, k, v, Mask())
        torch.testing.assert_close(out, expected)
        names[name] = {event.key for event in prof.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names["flash"]
    assert "aten::_scaled_dot_product_attention_math" in names["math"]
    assert set(KERNELS) == {"cudnn", "flash", "efficient", "math"}


def test_training_takes_the_option() -> None:
    model = jobs.llama(2)
    usual = jobs.train(0, jobs.make_config(model), 1, steps=2)
    assert jobs.train(0, jobs.make_config(model, attention="flash"), 1, steps=2) == usual
    scores = jobs.train(0, jobs.make_config(model, attention="math"), 1, steps=2)
    np.testing.assert_allclose(scores, usual, rtol=1e-5)
    with pytest.raises(UserError, match="--attention cudnn: it runs on CUDA"):
        jobs.train(0, jobs.make_config(model, attention="cudnn"), 1)


def test_efficient_attention_has_a_key_for_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel knows no grouped heads: on a GPU torch found none at all."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen: list[Any] = []
    q, k = (torch.randn(1, heads, 6, 8) for heads in (4, 2))
    for name in ("efficient", "flash"):
        run = select(name, lambda *args: seen.append(args), AttentionCase(GPU, BF16, 64))
        run(q, k, 2 * k, "mask")
    (_, keys, values, mask), (_, *grouped) = seen
    assert mask == "mask"
    for head in range(4):
        assert torch.equal(keys[:, head], k[:, head // 2])
        assert torch.equal(values[:, head], 2 * k[:, head // 2])
    assert [x.shape[1] for x in grouped[:2]] == [2, 2]


@pytest.mark.parametrize(
    ("installed", "capability", "deterministic", "fault", "version"),
    [
        (True, (9, 0), False, None, 3),
        (False, (9, 0), False, None, 2),
        (True, (10, 0), False, None, 2),
        (True, (9, 0), True, None, 2),
        (True, (9, 0), False, RuntimeError("does not expose FA3 backward kernels"), 2),
    ],
)
def test_flash_attention_3_where_it_is_installed_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    capability: tuple[int, int],
    deterministic: bool,
    fault: Exception | None,
    version: int,
) -> None:
    active: list[str] = []

    def activate(name: str) -> None:
        if fault is not None:
            raise fault
        active.append(name)

    found = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "flash_attn_interface" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    case = AttentionCase(GPU, BF16, 64, deterministic=deterministic)
    assert [flash_version(case) for _ in range(2)] == [version] * 2
    assert active == ["FA3"] * (version == 3)


def test_a_torch_that_knows_no_flash_attention_3_goes_on_with_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert flash_version(AttentionCase(GPU, BF16, 64)) == 2
