"""Credentials in what is said: known by their values or their form, in every way in which they may be quoted."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from megalite.core.base import redact
from megalite.core.base.errors import UserError, describe
from megalite.core.base.log import logger, setup_logging
from megalite.extras.local_words import local_words
from megalite.runtime.base.urls import check_url
from megalite.runtime.options.run import Config, RunConfig
from megalite.runtime.places import store
from megalite.runtime.places.store import Store
from tests.ranks import ROOT
from tests.rows import always_run

# Forms that nothing but their values gives away. A value may begin with a slash, as a path does.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "GK31c2f218a2e44f485b94239e",
    "AWS_SECRET_ACCESS_KEY": "/b892c0665/f0ada8a4755dae+98baa3/b133590e11dae3bcc1f9d7",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzE//////////wEaDKiUUQ==",
    "HTTPS_PROXY": "http://proxyuser:9k/Lm2@pQ77x@proxy:3128",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=Zm9vYmFyYmF6cXV4/9==;E",
}
PROFILE = {"aws_access_key_id": "profilekey77zz1100", "aws_secret_access_key": "wJalrXU/tnFEMI/K7MDENG+bPxRfiCYz"}
SECRETS = [
    *list(ENVIRONMENT.values())[:3],
    "9k/Lm2@pQ77x",
    "Zm9vYmFyYmF6cXV4/9==",
    *PROFILE.values(),
]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    lines = [f"{name} = {value}" for name, value in PROFILE.items()]
    (tmp_path / "credentials").write_text("\n".join(["[other]", *lines]))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(redact, "_held", set())
    pytest.importorskip("s3fs")
    store._open.cache_clear()
    Store("s3://bucket/x")


@pytest.mark.parametrize("secret", SECRETS)
def test_what_is_known_is_nowhere_said(secret: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As it is, in a URL, in a query, in base64; in an error of a library, an error of ours, a line of a log."""
    quoted = urllib.parse.quote(secret, "")
    encoded = base64.b64encode(f"user:{secret}@".encode()).decode()
    # Of base64 the ends stay, which their neighbours decide.
    third = len(encoded) // 3
    setup_logging(0, tmp_path / "log")
    for form in (secret, quoted, urllib.parse.quote(quoted, ""), encoded):
        words = f"before {form} after"
        logger.error(words)
        said = [describe(OSError(words)), str(UserError(words, words, words)), str(UserError.from_message(words))]
        said += [capsys.readouterr().err, (tmp_path / "log").read_text()]
        for text in said:
            assert "before" in text
            assert "after" in text
            assert (form if form != encoded else encoded[third:-third]) not in text


def test_words_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short values, which may be words, and names of files."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = f"test {tmp_path}/a: false, s3://bucket/a, abfs://container@account/a, a@b"
    assert redact.mask(text) == text


@pytest.mark.parametrize(
    "url",
    [
        "s3://KEY:hidden@bucket/run",
        "s3://KEY:abc/hidden@bucket/run",
        "s3://KEY:a@b/hidden@bucket/run",
        "s3://hidden@bucket/run",
        "s3://bucket/run/hidden@",
        "s3://KEY:hidden/run",
        "https://me:hidden@host:80/run",
        "abfs://container@account/x:hidden@y",
        "s3://bucket/x?token=hidden",
    ],
)
def test_a_url_with_a_user_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever the user stands, in every option, before other processes are given the command; and never quoted."""
    with pytest.raises(UserError) as e:
        check_url("--run-dir", url)
    assert "hidden" not in str(e.value)
    with pytest.raises(UserError) as e:
        RunConfig(resume=url)
    assert "hidden" not in str(e.value)
    if "@" not in url:
        return
    assert "hidden" not in redact.mask(f"no such thing: {url}")
    with pytest.raises(UserError, match="--wandb-project") as e:
        Config(run=RunConfig(wandb_project=url))
    assert "hidden" not in str(e.value)
    for words in (["--", "pretrain_gpt.py", f"--run-dir={url}"], ["--", "pretrain_gpt.py", "--run-dir", url]):
        with pytest.raises(UserError, match="--run-dir") as e, local_words("launch", words):
            pass
        assert "hidden" not in str(e.value)


@pytest.mark.parametrize("url", ["s3://bucket/a", "sftp://host:22/a", "s3://arn:aws:s3:eu:1:accesspoint/n/a"])
def test_other_urls_are_taken(url: str) -> None:
    check_url("--run-dir", url)


def test_what_a_session_holds_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of a role come from the network, and from no file."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)

    class Named:
        def __init__(self, **attributes: object) -> None:
            vars(self).update(attributes)

    credentials = Named(_access_key="roleaccesskey001", _secret_key="rolesecret/0123456789", _token="roletoken000111")
    signer = Named(_credentials=credentials)
    redact.learn(Named(_s3=Named(_request_signer=signer), storage_options={"password": "passw0rd!!"}))
    said = redact.mask("roleaccesskey001 rolesecret/0123456789 roletoken000111 passw0rd!!")
    assert said == "... ... ... ..."


# What raises an error that quotes a credential, and where Python prints it.
UNCAUGHT = {
    "a rank": "from megalite.runtime.start.exit import leaving_together\nwith leaving_together():\n    fail()",
    "a thread of a rank": (
        "import threading\nfrom megalite.runtime.start.exit import leaving_together\n"
        "with leaving_together():\n    thread = threading.Thread(target=fail)\n    thread.start()\n    thread.join()"
    ),
    "a child": "from megalite.runtime.base import child\nchild._serve('failing', '{}')",
    "a tool": "from megalite.extras.tool import run_tool\nrun_tool(fail)",
    "ranks of a notebook": "from megalite.extras.notebook.ranks import run_ranks\nrun_ranks(1, lambda rank: fail())",
}


@pytest.mark.parametrize("who", always_run(UNCAUGHT, "a thread of a rank", "a tool"))
def test_a_traceback_holds_no_credential(who: str, tmp_path: Path) -> None:
    secret = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    lines = ["import os", "def main():", "    raise RuntimeError('said ' + os.environ['AWS_SECRET_ACCESS_KEY'])"]
    (tmp_path / "failing.py").write_text("\n".join(lines))
    code, env = f"from failing import main as fail\n{UNCAUGHT[who]}", {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "RuntimeError: said ..." in done.stderr
    assert secret not in done.stdout + done.stderr
