"""Published runs of other stacks, read as configs of this project, to check the models of time and memory.

Used by `megalite plan check` only: how Megatron-LM, NeMo, DeepSpeed, FSDP and nanotron store states, and what their
tools report as memory, does not affect plans. A row is the JSON of docs/plan.md: model, layout, sw (the stack) and the
measurements; or `options`, the words of `megalite plan` for the same layout here, with `n_gpus` and the measurements. A
stack with an unknown name has no extra overhead, nor has one that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, require
from megalite.core.base.hardware import DEVICES
from megalite.core.mesh.grid import Grid
from megalite.core.model.partition import block_work, stage_layers
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.recompute import MODES
from megalite.core.options.train import TrainConfig
from megalite.core.pipeline.schedule import placement_of
from megalite.extras.plan.cluster import FITTED, Cluster, Constants, read_tree
from megalite.extras.plan.memory.activations import block_activations
from megalite.extras.plan.memory.in_flight import in_flight_by_rank
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.stages import parameters_on_rank, vocab_rows
from megalite.extras.plan.time.block import Engine, engine_of
from megalite.extras.plan.time.step import StepTime, step_time
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

# What eager code keeps of RMSNorm, rotation and SwiGLU, each made of several kernels, as a factor of the block; fitted.
# LayerNorm and GELU are one kernel each in eager code too.
_EAGER_KEEPS = 1.3
# Seconds of DeepSpeed's pipeline engine per block, forward pass and micro-batch, fitted.
_DEEPSPEED = 4.2e-3
# Bytes per hidden unit and token that nanotron keeps of inputs gathered over tp: two tensors per block.
_GATHERED = 4
# Bytes per weight and micro-batch of a separate kernel that accumulates gradients, in fp16 or fp32.
_ACCUMULATE = {"ds_fp16": 6, "ds_bf16": 10, "nanotron": 10}
# Factor and bytes from allocated to reported memory: the allocator's slack, then context and communication buffers.
_RESERVED = (1.04, 0.3e9)
_CONTEXT = 2.2e9
_DEEPSPEED_SEEN = (1.118, 11.3e9)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        row: row of the file.
        cfg, grid: the run in this project's terms.
        engine: what the stack fuses and overlaps.
        gpu: name of the GPU in `DEVICES`.
    """

    row: Mapping[str, Any]
    cfg: Config
    grid: Grid
    engine: Engine
    gpu: str

    @property
    def id(self) -> str:
        return str(self.row["id"])

    @property
    def source(self) -> str:
        """Group of rows from one publication."""
        return str(self.row["group"])

    @property
    def scope(self) -> str:
        return str(self.row["scope"])

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds per step, if any."""
        return self._measured("step_time_s")

    @property
    def mem_gb(self) -> float | None:
        """Measured memory in 1e9 bytes, if any."""
        return self._measured("mem_GB")

    def _measured(self, name: str) -> float | None:
        value = (self.row.get("measured") or {}).get(name)
        return None if value is None else float(value)

    @property
    def schedule(self) -> str:
        return "interleaved" if self.cfg.parallel.vp > 1 else "1f1b"

    def cluster(self, constants: Constants = FITTED) -> Cluster:
        row = self.row
        return Cluster(
            DEVICES[self.gpu], self.grid.world, row["gpus_per_node"], row["ib_GBps_per_gpu"] * 1e9, constants
        )

    def time(self, constants: Constants = FITTED, cluster: Cluster | None = None) -> StepTime:
        """Predict its step."""
        where = cluster or self.cluster(constants)
        return step_time(self.cfg, self.grid, where, self.schedule, self.engine)

    def memory(self) -> float:
        """Predict the bytes that the source's tool reports, or the part that it reports."""
        if "sw" not in self.row:
            return max(rank.total for rank in memory_per_rank(self.cfg, self.grid))
        measured, sw = self.row.get("measured") or {}, self.row["sw"]
        ranks = [self._parts(rank) for rank in range(self.cfg.parallel.pp)]
        part = measured.get("mem_part")
        if part is not None:
            return max(states if part == "states" else kept for states, kept in ranks)
        allocated = max(states + kept for states, kept in ranks)
        kind = measured.get("mem_kind")
        if kind == "max_allocated" or sw["stack"] == "nanotron":  # which does not name its tool
            return allocated
        if sw["stack"] == "megatron-deepspeed":
            return _DEEPSPEED_SEEN[0] * allocated + _DEEPSPEED_SEEN[1]
        reserved = _RESERVED[0] * allocated + _RESERVED[1]
        return reserved + (_CONTEXT if kind in ("nvidia_smi", None) else 0.0)

    def fits(self) -> bool:
        """Whether its memory, as the device counts it, fits the device."""
        seen = self.memory() if (self.row.get("measured") or {}).get("mem_part") is None else 0.0
        return seen <= DEVICES[self.gpu].memory

    def _parts(self, rank: int) -> tuple[float, float]:
        """Compute (states, activations with logits) of a pipeline rank at the peak, in allocated bytes."""
        cfg = self.cfg
        sw = self.row["sw"]
        p = self.cfg.parallel
        dp = self.grid.batch_ranks
        placement = placement_of(self.schedule, p.pp, p.vp)
        tokens = cfg.train.micro_batch_size * cfg.model.seq_len // p.cp
        layers = stage_layers(cfg)
        elements = parameters_on_rank(cfg, p.tp, placement, layers, rank)
        kept = self._per_block(cfg, tokens)
        activations = self._blocks_held(layers, rank) * kept[cfg.train.recompute]
        # A block is recomputed when the logits are gone.
        live = kept["none"] - kept[cfg.train.recompute]
        width = 2 * vocab_rows(cfg) * cfg.model.hidden_size
        matrices = 2 * block_work(cfg.model, cfg.model.block_kind(0)).weights
        states = elements * _bytes_per_parameter(sw["states"], dp, p.zero)
        if p.zero == 3:
            states += (2 * matrices + max(width, matrices)) / p.tp + width
        elif sw["states"] in ("mega_dist", "nemo_dist"):
            states += matrices / p.tp  # TransformerEngine's dummy weight gradients of one block
        logits = tokens * (10 * vocab_rows(cfg) + 4 * cfg.model.hidden_size) if rank == p.pp - 1 else 0.0
        return states, activations + max(live, logits)

    def _blocks_held(self, layers: Sequence[range], rank: int) -> int:
        """Count the blocks whose activations a rank holds at the peak, each stage by its own layers."""
        p, m = self.cfg.parallel, self.cfg.num_microbatches(self.grid["dp"])
        # More than a few rounds of the pipeline hold no more; the interleaved schedule runs whole rounds.
        rounds = min(-(-m // p.pp), 4) * p.pp if p.vp > 1 else min(m, 2 * p.pp)
        sizes = [len(layers[stage]) for stage in placement_of(self.schedule, p.pp, p.vp).stages_of(rank)]
        states = in_flight_by_rank(self.schedule, p.pp, p.vp, rounds)[rank]
        return max(sum(n * size for n, size in zip(state.kept, sizes)) for state in states)

    def _per_block(self, cfg: Config, tokens: int) -> dict[str, float]:
        """Compute the bytes that a block keeps per micro-batch, by recomputation mode."""
        m, row = cfg.model, self.row
        scores = 5.0 * m.num_heads * m.seq_len * tokens / cfg.parallel.tp
        kept = {name: float(block_activations(cfg, m.block_kind(0), mode.most)) for name, mode in MODES.items()}
        kept["none"] *= _EAGER_KEEPS if m.gated and not row["sw"]["fused"] else 1
        kept["none"] += 0 if row["layout"]["flash"] else scores
        if row["sw"]["stack"] == "nanotron" and cfg.parallel.sequence_parallel:
            kept["none"] += _GATHERED * tokens * m.hidden_size * (1 - 1 / cfg.parallel.tp)
        if row["sw"]["selective_ac_ops"]:
            kept["none"] /= 2
        return kept


def read_runs(path: Path) -> list[Run]:
    """Read published runs, and the layouts that were published as out of memory (`scope` oom).

    Raises:
        UserError: the file is missing or is not of this format.
    """
    given, remedy = f"--reference {path}", "give published runs as in benchmarks/plan/published.json"
    tree = read_tree(path, given, remedy)
    rows = tree.get("rows")
    if not isinstance(rows, list):
        raise UserError(given, "has no list of rows", remedy)
    runs = []
    for row in [*rows, *tree.get("out_of_memory", [])]:
        name = f"its row {row['id']!r}" if isinstance(row, dict) and "id" in row else "a row without id"
        try:
            runs.append(_read(row))
        except KeyError as e:
            raise UserError(given, f"{name} has no {e}", remedy) from None
        except (ValueError, TypeError, AttributeError):
            raise UserError(given, f"{name} is of another form", remedy) from None
        gpu = runs[-1].gpu
        require(gpu in DEVICES, given, f"{name} is of an unknown gpu {gpu}", f"use one of {', '.join(DEVICES)}")
        if "sw" in row:
            states = row["sw"]["states"]
            require(states in _STATES, given, f"{name} has unknown states {states}", f"use one of {', '.join(_STATES)}")
    return runs


def _read(row: Mapping[str, Any]) -> Run:
    if "options" in row:
        cfg = cli.parse(row["options"].split(), world=row["n_gpus"]).config
        return Run(row, cfg, Grid.from_config(cfg.parallel, row["n_gpus"]), engine_of(cfg), row["gpu"].lower())
    m = row["model"]
    o = row["layout"]
    sw = row["sw"]
    model = ModelConfig.from_arch(
        "gpt2" if m["norm"] == "ln" else "llama",
        num_layers=m["L"],
        hidden_size=m["h"],
        num_heads=m["a"],
        num_kv_heads=m["kv"],
        ffn_hidden_size=m["ffn"],
        activation="swiglu" if m["mlp"] == "swiglu" else "gelu",
        vocab_size=m["vocab"],
        seq_len=m["seq"],
        tie_embeddings=m["tied"],
        hidden_dropout=0.1 * m["dropout"],
        attention_dropout=0.1 * m["dropout"],
    )
    parallel = ParallelConfig(
        tp=o["tp"],
        pp=o["pp"],
        vp=o["vpp"],
        cp=o["cp"],
        cp_comm="ring",
        sequence_parallel=o["sp"],
        zero=o["zero"],
        pipeline_layout=_layout(row, model, o["pp"] * o["vpp"]),
    )
    train = TrainConfig(
        micro_batch_size=o["mbs"], global_batch_size=o["gbs"], precision="bf16", recompute=o["recompute"]
    )
    cfg = Config(model=model, parallel=parallel, train=train)
    grid = Grid.of(o["pp"] * o["dp"] * o["cp"] * o["tp"], tp=o["tp"], pp=o["pp"], cp=o["cp"])
    engine = Engine(
        fused=sw["fused"],
        flash=o["flash"],
        tp_waits=(0, 0) if sw["overlap_tp"] else (4, 4),
        tp_hides=(4, 4) if sw["overlap_tp"] else (0, 0),
        overlap_pp=sw["overlap_pp"],
        overlap_dp=sw["overlap_dp"],
        overlap_gather=sw["overlap_dp"],
        grad_bytes=sw["grad_comm_bytes"],
        saves_half=sw["selective_ac_ops"],
        accumulate=_ACCUMULATE.get(sw["states"], 0),
        host=_DEEPSPEED if sw["stack"] == "megatron-deepspeed" else 0.0,
    )
    return Run(row, cfg, grid, engine, row["gpu"].lower())


def _layout(row: Mapping[str, Any], model: ModelConfig, stages: int) -> str | None:
    """Write how the stack splits the layers as a `--pipeline-layout`: a rule by its name, or the layout itself."""
    layers, how = model.num_layers, row.get("layers_first_last")
    if how == "balanced":
        return None
    if how == "transformer|embedding":  # embedding and output layer take the slot of a block each
        each = -(-(layers + 2) // stages)
        counts = [each - (i == 0) - (i == stages - 1) for i in range(stages)]
    elif isinstance(how, list):  # layers of the first and the last stage; the others share the rest
        between = layers - sum(how)
        counts = [how[0], *(between // (stages - 2) + (i < between % (stages - 2)) for i in range(stages - 2)), how[1]]
    elif how is not None:
        return str(how)
    else:
        counts = [-(-layers // stages)] * stages
    for i in range(stages):
        counts[i] = min(counts[i], layers - sum(counts[:i]))
    counts[-1] = layers - sum(counts[:-1])
    return ",".join(map(str, counts))


# Stack -> bytes per parameter of weights, gradients and optimizer: replicated on each rank, and sharded over dp.
_STATES = {
    "mega18": (18, 0),
    "mega_dist": (6, 12),
    "nemo_dist": (4, 10),
    "ds_fp16": (4, 12),
    "ds_bf16": (8, 12),
    "nanotron": (8, 12),
    "fsdp": (0, 16),
    "zero2": (2, 16),
}


def _bytes_per_parameter(states: str, dp: int, zero: int) -> float:
    replicated, sharded = _STATES[states]
    return replicated + sharded / (dp if zero or states != "nanotron" else 1)
