"""Files of Megatron-LM made by hand: the older names, virtual stages, what is refused, and attacks."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from megalite.core.base.errors import UserError
from megalite.extras.convert.megatron.archive import FileRange, TensorRef, load_archive
from megalite.extras.convert.megatron.config import model_of
from megalite.extras.convert.megatron.convert import import_megatron
from megalite.extras.convert.megatron.torch_dist import TorchDistSource
from megalite.extras.convert.megatron.unpickle import unpickle
from tests.unit.checkpoint.jobs import whole_tensors
from tests.unit.extras.convert.legacy_megatron import ARGS, HIDDEN, draw, write_legacy


def test_older_names_and_virtual_stages_bit_for_bit(tmp_path: Path) -> None:
    states = {"rng_state": [{"np_rng_state": np.random.get_state(), "random_rng_state": (3, (1, 2), None)}]}
    wanted = write_legacy(tmp_path / "theirs", ARGS, **states)
    manifest = import_megatron(tmp_path / "theirs", tmp_path / "ckpt")
    assert manifest.step == 3
    ours = whole_tensors(tmp_path / "ckpt")
    assert ours.keys() == {f"master {name}" for name in wanted}
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(ours[f"master {name}"], tensor.numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_experts", 8),
        ("rotary_interleaved", True),
        ("window_size", (128, 0)),
        ("position_embedding_type", "yarn"),
        ("squared_relu", True),
        ("softmax_type", "learnable"),
        ("normalization", "ScaleNorm"),
        ("mtp_num_layers", 1),
    ],
)
def test_options_without_a_counterpart_are_refused_by_name(option: str, value: Any) -> None:
    args = {k: v for k, v in ARGS.items() if k != "use_rotary_position_embeddings"}
    model_of({**args, "position_embedding_type": "rope"}, "args")
    with pytest.raises(UserError) as e:
        model_of({**args, "position_embedding_type": "rope", option: value}, "args")
    assert f"{option} {value!r}" in str(e.value)
    assert ("modules of Megatron checkpoints are not imported" in str(e.value)) == (option == "mtp_num_layers")


def test_damage_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    write_legacy(folder, ARGS)
    file = folder / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = file.read_bytes()

    def refused(match: str, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            import_megatron(folder, tmp_path / "ckpt", **options)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]

    file.write_bytes(whole[: len(whole) // 2])
    refused("is not a file of torch.save")
    content = torch.load(io.BytesIO(whole), weights_only=False)
    content["model0"]["language_model"]["encoder"]["layers.0.mlp.router.weight"] = draw(8, HIDDEN)
    torch.save(content, file)
    refused("do not hold the same weight tensors")
    file.unlink()
    refused("cannot be opened")
    file.parent.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(folder / "elsewhere")
    refused("tensor rank 1, pipeline rank 1")
    file.parent.symlink_to(folder / "elsewhere")
    refused("is a link")
    refused("iter_0000009.*holds neither", iteration=9)
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    refused("neither a number nor release")
    shutil.rmtree(folder)
    folder.touch()
    refused("is not a folder")


class _Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def _attacks(mark: Path) -> dict[str, bytes]:
    """Pickles that would leave `mark` behind, and the name that each must be refused by."""
    system = pickle.dumps(_Call(os.system, f"touch {mark}"))
    nested = {"args": [(1, {"deep": _Call(eval, f"open({str(mark)!r}, 'w')")})]}
    return {
        "posix.system": system,
        "builtins.eval": pickle.dumps(nested, protocol=4),
        "__builtin__.eval": pickle.dumps(nested, protocol=2),
        "torch.serialization.load": pickle.dumps(_Call(torch.load, str(mark))),
        "builtins.getattr": pickle.dumps(_Call(getattr, argparse.Namespace(), "__class__")),
        "os.system": b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.",
        "torch._utils.__dict__": b"ctorch._utils\n__dict__\n.",
        "torch.storage._load_from_bytes": b"ctorch.storage\n_load_from_bytes\n(C\x01atR.",
    }


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    """Each is refused by name, alone and in every file that the importer opens."""
    mark = tmp_path / "executed"
    for name, data in _attacks(mark).items():
        with pytest.raises(UserError, match=f"names '{name}'"):
            unpickle(data, "file")
    attack = _Call(os.system, f"touch {mark}")
    folder = tmp_path / "torch_dist"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(attack))
    with pytest.raises(UserError, match="posix.system"):
        import_megatron(folder, tmp_path / "ckpt")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({}, storage_data={})))
    torch.save({"args": attack}, folder / "common.pt")
    with pytest.raises(UserError, match="posix.system"):
        import_megatron(folder, tmp_path / "ckpt")
    write_legacy(tmp_path / "legacy", ARGS, optimizer={"state": attack})
    with pytest.raises(UserError, match="posix.system"):
        import_megatron(tmp_path / "legacy", tmp_path / "ckpt")
    assert not mark.exists()


def test_records_cannot_be_changed_or_called() -> None:
    """Setting attributes of a record's class is refused; names of Megatron-LM stay inert, whatever they are."""
    namespace = b"cargparse\nNamespace\n"
    with pytest.raises(UserError, match="is not a pickle of a checkpoint"):
        unpickle(namespace + b"(N(dS'__new__'\n" + namespace + b"stb.", "file")
    made = unpickle(b"cmegatron.core.utils\nrun_anything\n(S'rm -rf'\ntR.", "file")
    assert (made.name, made.args) == ("megatron.core.utils.run_anything", ("rm -rf",))
    # Neither an index nor a length allocates gigabytes.
    assert unpickle(b"\x80\x02]r\xff\xff\xff\x7f.", "file") == []
    for garbage in (
        b"\x80\x05\x96" + (1 << 42).to_bytes(8, "little") + b".",
        b"",
        b"\x80\x04",
        b"(((((",
        b"\x80\x02]\xff.",
        b"I1\nb.",
    ):
        with pytest.raises(UserError, match="is not a pickle of a checkpoint"):
            unpickle(garbage, "file")


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, _Claim) else None


class _Claim:
    def __init__(self, key: str, numel: int) -> None:
        self.pid = ("storage", torch.FloatStorage, key, "cpu", numel)


def test_tensors_stay_inside_their_storage(tmp_path: Path) -> None:
    """Sizes and strides that reach beyond it, keys that do not exist, negative ones; a view inside it is read."""
    rebuild = torch._utils._rebuild_tensor_v2

    def load(key: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
            data, claim = io.BytesIO(), _Claim(key, 1 << 40)
            _Pickler(data, protocol=2).dump(_Call(rebuild, claim, offset, shape, stride, False, None))
            file.writestr("a/data.pkl", data.getvalue())
            file.writestr("a/data/0", np.arange(6, dtype=np.float32).tobytes())
        return load_archive(FileRange(tmp_path, "a.pt"))

    view = load("0", 1, (2, 2), (1, 3))
    assert isinstance(view, TensorRef)
    assert view.read().tolist() == [[1.0, 4.0], [2.0, 5.0]]
    bad = [
        ("0", 0, (7,), (1,)),
        ("0", -1, (2,), (1,)),
        ("0", 0, (2, 2), (1, 6)),
        ("0", 0, (2,), (-1,)),
        ("1", 0, (2,), (1,)),
    ]
    for arguments in bad:
        with pytest.raises(UserError, match="lies outside its storage"):
            load(*arguments)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (("../secret", 0, 64), "must be a plain name"),
        (("/etc/passwd", 0, 64), "must be a plain name"),
        (("link.distcp", 0, 64), "is a link"),
        (("small.distcp", 0, 1 << 40), "but needs 1099511627776 from byte 0"),
        (("small.distcp", -8, 8), "but needs 8 from byte -8"),
    ],
)
def test_only_files_of_the_folder_are_read(tmp_path: Path, place: tuple[str, int, int], match: str) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 64)
    (folder / "link.distcp").symlink_to(tmp_path / "secret")
    (folder / "small.distcp").write_bytes(b"x" * 64)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size([4]), [chunk])
    index = metadata.MetadataIndex("decoder.final_layernorm.weight", torch.Size([0]))
    stored = {index: filesystem._StorageInfo(*place)}
    content = metadata.Metadata({"decoder.final_layernorm.weight": tensor}, storage_data=stored)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    torch.save({"args": argparse.Namespace(**ARGS)}, folder / "common.pt")
    with pytest.raises(UserError, match=match):
        TorchDistSource(folder).read("weight", "decoder.final_layernorm.weight")
