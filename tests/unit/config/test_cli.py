"""The command line: precedence, one-line errors, help, and a configuration that prints and reads back unchanged."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.core.options.rope import RopeScaling
from megalite.core.parts.families import FAMILIES, PRESETS
from megalite.runtime.options.cli import parse, to_yaml
from megalite.runtime.options.run import Config


def config(*argv: str) -> Config:
    return parse(list(argv)).config


def write(path: Path, tree: Any) -> str:
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return str(path)


# ------------------------------------------------------------------------------------------------------ precedence


def test_no_arguments_are_the_defaults() -> None:
    parsed = parse([])
    assert parsed.config == Config()
    assert (parsed.print_config, parsed.dry_run) == (False, False)


def test_flags_of_every_type() -> None:
    c = config(
        *shlex.split("--tp 2 --lr=1e-3 --no-sequence-parallel --tie-embeddings --precision bf16 --zero 0"),
        *shlex.split("--data 0.7 A 0.3 B --tokenizer T --num-kv-heads 2 --vocab_size 64 --rope-scaling"),
        "{factor: 2}",
    )
    assert (c.parallel.tp, c.optim.lr, c.parallel.sequence_parallel, c.model.tie_embeddings) == (2, 1e-3, False, True)
    assert (c.train.precision, c.parallel.zero, c.data.tokenizer) == ("bf16", 0, "T")
    assert c.data.data == ("0.7", "A", "0.3", "B")
    assert (c.model.kv_heads, c.model.vocab) == (2, 64)
    assert c.model.rope_scaling == RopeScaling(factor=2.0)


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", {"model": {"norm_eps": 2e-4, "rope_theta": 2.0}, "optim": {"lr": 2.0}})
    two = write(tmp_path / "2.yaml", {"model": {"rope_theta": 3.0}, "optim": {"lr": 3.0}})
    assert config().model.norm_eps == 1e-5
    assert config("--arch", "qwen3").model.norm_eps == 1e-6
    assert config("--preset", "qwen3-0.6b").model.head_dim == 128
    c = config("--lr", "4", "--config", one, "--preset", "qwen3-0.6b", "--config", two)
    assert (c.model.qk_norm, c.model.num_layers) == ("head", 28)
    assert (c.model.norm_eps, c.model.rope_theta, c.optim.lr) == (2e-4, 3.0, 4.0)


def test_flags_win_over_the_family_of_a_preset() -> None:
    m = config("--preset", "gpt2-124m", "--norm", "rmsnorm", "--no-tie-embeddings").model
    assert (m.norm, m.tie_embeddings, m.position) == ("rmsnorm", False, "learned")


def test_derived_sizes_follow_the_overriding_flags() -> None:
    m = config("--preset", "gpt2-124m", "--num-heads", "6", "--hidden-size", "384", "--seq-len", "64").model
    assert (m.num_kv_heads, m.head_dim, m.ffn_hidden_size, m.max_position_embeddings) == (6, 64, 1536, 64)


def test_the_same_family_may_be_named_twice() -> None:
    assert config("--preset", "gpt2-124m", "--arch", "gpt2") == config("--preset", "gpt2-124m")


def test_a_repeated_flag_overrides_itself_and_data_is_extended() -> None:
    c = config(*shlex.split("--lr 1 --lr 2 --no-shuffle --shuffle --data 0.7 A --data 0.3 B"))
    assert (c.optim.lr, c.data.shuffle, c.data.data) == (2.0, True, ("0.7", "A", "0.3", "B"))


def test_data_of_the_command_line_replaces_that_of_a_file(tmp_path: Path) -> None:
    recipe = write(tmp_path / "c.yaml", {"data": {"data": ["A", "B"]}})
    assert config("--config", recipe).data.data == ("A", "B")
    assert config("--config", recipe, "--data", "C").data.data == ("C",)


def test_yaml_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-4 as a string; nobody means that.
    recipe = write(tmp_path / "c.yaml", "optim: {lr: 1e-4, min_lr: 0}\ntrain: {precision: bf16}\nrun:\n")
    c = config("--config", recipe)
    assert (c.optim.lr, c.optim.min_lr, c.train.precision) == (1e-4, 0.0, "bf16")


def test_print_config_and_dry_run_are_reported() -> None:
    assert parse(["--print-config"]).print_config
    assert parse(["--dry-run"]).dry_run


# ---------------------------------------------------------------------------------------------------------- errors

FLAG_ERRORS = [
    ("--tpp 2", "--tpp 2: is an unknown flag; did you mean --tp?"),
    ("--num-layer 2", "--num-layer 2: is an unknown flag; did you mean --num-layers?"),
    ("--learning-rates 1", "--learning-rates 1: is an unknown flag; "),
    ("--wandb x", "--wandb x: is an unknown flag; did you mean --wandb-project?"),
    ("--sequence-paralel", "did you mean --sequence-parallel?"),
    ("--xyzzy", "--xyzzy: is an unknown flag; see --help"),
    ("--no-tp", "--no-tp: is an unknown flag"),
    ("-tp 2", "-tp: is not a flag; flags have two dashes: --tp"),
    ("train", "train: is not a flag"),
    ("--tp two", "--tp two: must be a whole number"),
    ("--tp 2.0", "--tp 2.0: must be a whole number"),
    ("--lr", "--lr: takes one value"),
    ("--lr 1 2", "--lr 1 2: takes one value"),
    ("--data", "--data: takes one or more values"),
    ("--vocab-size many", "--vocab-size many: must be a whole number or null"),
    ("--shuffle false", "--shuffle false: takes no value"),
    ("--tie-embeddings=1", "--tie-embeddings 1: takes no value"),
    ("--precision bf61", "--precision bf61: must be one of fp32, bf16, fp16; did you mean bf16?"),
    ("--arch lama", f"--arch lama: must be one of {', '.join(FAMILIES)}; did you mean llama?"),
    ("--preset llama-2-7", "; did you mean llama-2-7b?"),
    ("--preset", "--preset: takes one value"),
    ("--print-config 3", "--print-config 3: takes no value"),
    (
        "--preset gpt2-124m --arch llama",
        "--arch llama: --preset gpt2-124m belongs to the family gpt2; drop one of the two",
    ),
    ("--rope-scaling {factr:1}", "has no field 'factr:1'"),
    ("--rope-scaling 8", "--rope-scaling 8: must be a mapping of rope_type, factor, original"),
    ("--rope-scaling {factor:", "must be a mapping of rope_type, factor"),
    ("--config nowhere.yaml", "--config nowhere.yaml: No such file or directory"),
]


@pytest.mark.parametrize(("argv", "message"), FLAG_ERRORS)
def test_mistake_on_the_command_line(argv: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv.split())
    assert message in str(caught.value)


FOREIGN = """--learning-rate=1|--tensor-model-parallel-size=2|--bf16|--strategy=auto|--deepspeed-config=F|
    --accelerate-config=F|--ignore-megatron-flags|--train-samples=8|--context-parallel-size=1"""


@pytest.mark.parametrize("flag", "".join(FOREIGN.split()).split("|"))
def test_without_a_dialect_flags_of_other_tools_are_unknown(flag: str) -> None:
    with pytest.raises(UserError, match=f"^{flag.replace('=', ' ')}: is an unknown flag; ") as caught:
        parse(["--lr", "1", flag, "--nothing"])
    assert "\n" not in str(caught.value)


YAML_ERRORS = [
    ("lr: 1", ": lr: must be one of model, parallel, data, train, optim, run; write lr under optim"),
    ("preset: tiny", "give --preset on the command line"),
    ("3: 4", ": 3: must be one of model"),
    ("train: 3", ": train: must contain 'name: value' lines"),
    ("train: {seed: 1.5}", ":train.seed 1.5: must be a whole number"),
    ("train: {seed: true}", ":train.seed True: must be a whole number"),
    (f"optim: {{lr: {'9' * 400}}}", "must be a number; correct the value"),
    ("train: {seed: null}", ":train.seed None: must be a whole number;"),
    ("train: {seed: [1]}", "train.seed [1]: must be a whole number"),
    ("train: {deterministic: 1}", "train.deterministic 1: must be true or false"),
    ("train: {deterministic: 'yes'}", "train.deterministic yes: must be true or false"),
    ("run: {run_dir: null}", "run.run_dir None: must be text"),
    ("run: {resume: no}", "run.resume False: must be text"),
    ('run: {run_dir: "a\\0b"}', "run.run_dir a\\x00b: must be text without zero bytes"),
    ("data: {data: {A: 0.7}}", "must be a list"),
    ("train: {precision: fp8}", "train.precision fp8: must be one of fp32, bf16, fp16"),
    ("model: {rope_scaling: {factor: true}}", "must be a mapping of rope_type, factor"),
    ("model: {rope_scaling: {factor: 0.5}}", "--rope-scaling"),
    ("model: {arch: bert}", f"model.arch bert: must be one of {', '.join(FAMILIES)}"),
    ("model: {num_layers: 0}", "--num-layers 0: must be at least 1"),
]


@pytest.mark.parametrize(("text", "message"), YAML_ERRORS)
def test_mistake_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(["--config", write(tmp_path / "c.yaml", text)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        parse(["--config", str(tmp_path)])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not valid YAML"):
        parse(["--config", str(tmp_path / "binary.yaml")])


def run_script(*argv: str) -> subprocess.CompletedProcess[str]:
    imports = "from megalite.runtime.options.cli import parse; from megalite.extras.tool import run_tool; "
    code = imports + "run_tool(lambda: parse() and None)"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)


def test_as_a_program_a_mistake_is_one_line_and_exit_2() -> None:
    done = run_script("--tp", "3", "--num-heads", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --")
    assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------- printed and read back


def read_back(c: Config, path: Path) -> Config:
    return config("--config", write(path, to_yaml(c)))


@pytest.mark.parametrize("preset", {preset["arch"]: name for name, preset in PRESETS.items()}.values())
def test_printed_preset_reads_back_equal(preset: str, tmp_path: Path) -> None:
    c = config("--preset", preset)
    assert read_back(c, tmp_path / "c.yaml") == c
    assert config("--config", str(tmp_path / "c.yaml"), "--seed", "5").train.seed == 5


def test_a_file_of_all_options_names_no_folder(tmp_path: Path) -> None:
    """Starts of runs read the model of an `--init-from-hf` folder; config.yaml has null for it."""
    c = config("--num-layers", "3")
    written = write(tmp_path / "c.yaml", to_yaml(c))
    assert parse(["--config", written], read_model=lambda folder, _: pytest.fail(folder)).config == c


positive = st.floats(min_value=1e-30, max_value=99.0)
word = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda x: x != "None")
prefix = word.filter(lambda x: not x.startswith("-"))
OVERRIDES: dict[str, st.SearchStrategy[Any]] = {
    "num-layers": st.integers(1, 200),
    "hidden-size": st.integers(1, 64).map(lambda n: 64 * n),
    "num-kv-heads": st.sampled_from([1, 2, 4]),
    "vocab-size": st.integers(2, 10**6),
    "norm-eps": positive,
    "rope-theta": positive,
    "rope-scaling": st.builds("{{factor: {}}}".format, st.floats(1, 1e5)),
    "activation": st.sampled_from(["swiglu", "geglu", "gelu", "gelu_tanh"]),
    "data": st.lists(prefix, min_size=1, max_size=4),
    "tokenizer": word,
    "split": word,
    "run-dir": word,
    "wandb-project": word,
    "seed": st.integers(0, 2**63 - 1),
    "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    "lr": positive,
    "eps": st.floats(1e-20, 99.0),
    "loss-scale": positive,
    "lr-decay-steps": st.integers(1, 10**9),
    "beta1": st.floats(0, 1, exclude_max=True),
    "zero": st.sampled_from([0, 1]),
}
SWITCHES = ["shuffle", "tensorboard", "deterministic", "qkv-bias", "tie-embeddings"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.fixed_dictionaries({}, optional=OVERRIDES),
    switches=st.dictionaries(st.sampled_from(SWITCHES), st.booleans()),
)
def test_any_configuration_reads_back_equal(options: dict[str, Any], switches: dict[str, bool], tmp_path: Path) -> None:
    argv = [f"--{name}" if on else f"--no-{name}" for name, on in switches.items()]
    for name, value in options.items():
        argv += [f"--{name}", *value] if isinstance(value, list) else [f"--{name}={value}"]
    c = config(*argv)
    assert read_back(c, tmp_path / "c.yaml") == c
    for name, value in options.items():
        if name != "rope-scaling":
            field = name.replace("-", "_")
            (group,) = [g for g in dataclasses.asdict(c).values() if field in g]
            assert group[field] == (tuple(value) if isinstance(value, list) else value)


def test_yaml_that_would_take_all_memory_is_refused(tmp_path: Path) -> None:
    lists = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
    for text, words in [("\n".join(lists), "an alias must stand for a single value"), ("[" * 100_000, "recursion")]:
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(UserError, match=words):
            parse(["--config", str(tmp_path / "x.yaml")])


def test_a_number_of_more_digits_than_python_reads(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(f"train: {{seed: {'1' * 5000}}}\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        parse(["--config", str(tmp_path / "long.yaml")])
