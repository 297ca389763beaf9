"""GPUs by their names, and the memory of a host, on trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.core.base.hardware import find_gpu, nvlink_speed, peak_of_name
from megalite.core.base.host_memory import available_memory, installed_memory, process_memory


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_of_name(name) == peak


def test_nvlink_by_the_name_of_the_gpu() -> None:
    matrix = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    assert nvlink_speed("NVIDIA H200", matrix) == 450e9
    assert nvlink_speed("NVIDIA GH200 480GB", matrix) is None
    assert nvlink_speed("NVIDIA H200", matrix.replace("NV18", "PHB")) is None


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    info = {"proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:   600 kB\n"}
    assert available_memory(tree(tmp_path / "host", info)) == 600 * 1024
    group = {
        **info,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "300000\n",
        "sys/fs/cgroup/job/memory.current": "250000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 7000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "9\n",
    }
    assert available_memory(tree(tmp_path / "two", group)) == 57_000
    old = {
        **info,
        "proc/self/cgroup": "3:cpu:/a\n2:memory:/b\n",
        "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/b/memory.usage_in_bytes": "4000\n",
    }
    assert available_memory(tree(tmp_path / "one", old)) == 1000


@pytest.mark.parametrize(
    ("name", "memory", "listed"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.4e9, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 84.9e9, "a100-80g"),
        ("NVIDIA H200", 150e9, "h200"),
        # A slice computes and holds a fraction of what its name says.
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42.4e9, None),
        ("NVIDIA GH200 480GB", 102e9, None),
    ],
)
def test_memory_decides_between_gpus_of_one_name(name: str, memory: float, listed: str | None) -> None:
    gpu = find_gpu(name, memory)
    assert (gpu and gpu.device.name) == listed


def test_a_process_has_less_than_the_host() -> None:
    assert 0 < process_memory() < installed_memory()
