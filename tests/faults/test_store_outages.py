"""Runs whose store is away for a while, loses answers, or is no store; and what they leave of credentials."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace
from tests.faults.store_runs import MODEL
from tests.faults.zygote import Zygote
from tests.stores import S3, BreakingProxy, Fault, environment


def test_a_part_that_comes_at_the_second_attempt(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> None:
    """Rank 1 fails first, and rank 0 commits when its part is there: the checkpoint is uploaded, and no error."""
    url = s3.url("runs/second")
    proxy.faults = [Fault(r"PUT .*/rank_00001\.safetensors", "403", 1)]
    flags = ["--run-dir", url, "--cache-dir", str(tmp_path / "cache"), "--train-steps", "1", "--upload-patience", "1"]
    left = zygote.start([*MODEL, *flags], 2, tmp_path, env=environment(proxy.port)).end()
    assert [rank.code for rank in left] == [0, 0], left
    assert proxy.faults[0].happened == 1
    assert len(StorePlace(Store(f"{url}/checkpoints")).committed()) == 1


def test_a_commit_whose_answer_is_lost(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> None:
    """Every time: the run looks whether it is there before it says that it is not."""
    url = s3.url("runs/unheard")
    proxy.faults = [Fault("PUT .*/COMMIT", "call-after")]
    flags = ["--run-dir", url, "--cache-dir", str(tmp_path / "cache"), "--train-steps", "1", "--upload-patience", "1"]
    (left,) = zygote.start([*MODEL, *flags], 1, tmp_path, env=environment(proxy.port)).end()
    assert (left.code, "is in the store all the same" in left.err) == (0, True), left
    assert len(StorePlace(Store(f"{url}/checkpoints")).committed()) == 1


def test_an_endpoint_to_which_everything_is_a_success(
    s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path
) -> None:
    """Found out before the first step, with one line."""
    proxy.faults = [Fault("runs/yes", "200")]
    flags = ["--run-dir", s3.url("runs/yes"), "--cache-dir", str(tmp_path / "cache"), "--train-steps", "1"]
    (left,) = zygote.start([*MODEL, *flags], 1, tmp_path, env=environment(proxy.port)).end()
    assert left.code == 2, left
    assert [line for line in left.err.splitlines() if "error:" in line and "does not keep what is written" in line]
    assert left.err.count("error:") == 1
    assert "step 1" not in left.err


@pytest.mark.full
def test_training_waits_for_data_that_are_away(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> None:
    """For longer than the watchdog waits for a rank: one line, and a step whose wait is in its record."""
    with IndexedDatasetWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.add_documents(np.random.default_rng(0).integers(0, 90, 300_000), [1000] * 300)
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90})
    for path in tmp_path.glob("text.*"):
        Store(s3.url("away")).write(path.name, path.read_bytes())
    # Units of 256 KiB: one that is there from the first step on, and one that is away, for some 25 s with these pauses.
    proxy.faults = [Fault(r"GET .*away/text\.bin", "503", 8, skip=1)]
    run = tmp_path / "run"
    flags = ["--data", s3.url("away/text"), "--run-dir", str(run), "--cache-dir", str(tmp_path / "cache")]
    model = [word for word in MODEL if word != "--mock-data"]
    arguments = [*model, *flags, "--train-steps", "60", "--watchdog-timeout", "8", "--read-patience", "200"]
    (left,) = zygote.start(arguments, 1, tmp_path, env=environment(proxy.port)).end()
    assert (left.code, "watchdog" in left.err) == (0, False), left
    assert proxy.faults[0].happened == 8
    assert left.err.count("trying again") == 1
    waits = [json.loads(line).get("data_wait_s", 0) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(waits) > 8


# Values that only the environment knows for secrets; the proxy's server quotes the first and the third in its errors.
NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
VALUES = ("GK31c2f218a2e44f485b94", "b892/c0665f0ada/8a4755+dae98baa3", "FwoGZXIvYXdzE//wEaDKiUUQ0a==")
URL_SECRET, ENDPOINT_PASSWORD = "abc/9def7712", "pw/0xfeed77"


@pytest.mark.full
@pytest.mark.parametrize("source", ["environment", "profile"])
def test_a_run_leaves_no_credential(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path, source: str) -> None:
    """Of six kinds: in its files, in what it says, in the command lines of its processes; whatever fails.

    The key's ID, its secret and the session's token, of the environment or a profile; a password of a proxy, a token of
    another service, and the user of a URL.
    """
    url = s3.url(f"runs/{source}")
    given = environment(proxy.port) | {
        "HF_TOKEN": "hf_1234567890abc",
        "HTTPS_PROXY": f"http://u:{ENDPOINT_PASSWORD}@p:1",
    }
    if source == "profile":
        fields = zip(("aws_access_key_id", "aws_secret_access_key", "aws_session_token"), VALUES)
        lines = "\n".join(["[mine]", *(f"{name} = {value}" for name, value in fields)])
        secret_file = tmp_path.with_name(f"{tmp_path.name}_credentials")
        secret_file.write_text(lines)
        given = {name: value for name, value in given.items() if name not in NAMES}
        given |= {"AWS_SHARED_CREDENTIALS_FILE": str(secret_file), "AWS_PROFILE": "mine"}
    else:
        given |= dict(zip(NAMES, VALUES))
    seen = list[str]()
    proxy.faults = [
        Fault("PUT .*/COMMIT", "503", 2),
        Fault("PUT .*/owner", "503", 2),
        Fault("PUT .*safetensors", "403", 1),
        Fault("PUT .*safetensors", "call-before", 1, action=lambda _: seen.append(_command_lines())),
    ]
    model = [*MODEL, "--run-dir", url, "--cache-dir", str(tmp_path / "cache"), "--save-every", "1"]
    unset = dict.fromkeys(NAMES, "") if source == "profile" else {}
    arguments = [*model, "--train-steps", "3", "--upload-patience", "1"]
    (left,) = zygote.start(arguments, 1, tmp_path, env={**unset, **given}).end()
    said = [left.err]
    assert "for AWS4-HMAC" in left.err
    proxy.faults = [Fault("bucket", "403")]
    wrong = url.replace("://", f"://{VALUES[0]}:{URL_SECRET}@")
    for flags in ([*model], [*model, "--run-dir", wrong], [*model, "--wandb-project", wrong]):
        (left,) = zygote.start([*flags, "--train-steps", "9"], 1, tmp_path, env={**unset, **given}).end()
        assert left.code == 2, left
        said.append(left.err)
    assert seen
    searched = [*said, *seen, *(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())]
    assert len(searched) > 10
    proxy.faults, store = [], Store(url)
    searched += [store.read(name).decode() for name in ("config.yaml", "metrics.jsonl")]
    for secret in (*VALUES, URL_SECRET, ENDPOINT_PASSWORD, "hf_1234567890abc"):
        assert [text for text in searched if secret in text] == []


def _command_lines() -> str:
    """Of all processes, as every user of the machine sees them."""
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
