"""The validator accepts every lowering and refuses mutants, and what it accepts runs on threads that block."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import SCHEDULES, ParallelConfig
from megalite.core.options.step import StepConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.schedules.simulate import MODES, DeadlockError, simulate
from megalite.core.parts.schedules.validate import InvalidScheduleError, validate
from megalite.core.pipeline.schedule import Costs, Op, build_schedule, lower, needed_by
from tests.rows import always_run


@st.composite
def configurations(draw, max_pp=8, max_vp=4, max_m=12):
    name, schedule = draw(st.sampled_from(list(SCHEDULES.items())))
    pp = draw(st.integers(1, max_pp))
    vp = schedule.vp or draw(st.integers(1, max_vp))
    m = draw(st.integers(1, max_m))
    group = None
    if schedule.grouped:
        m = max(m, pp)
        group = draw(st.sampled_from([g for g in range(pp, m + 1) if m % g == 0 or m % g >= pp]))
    return name, pp, vp, m, group


@pytest.mark.parametrize("sizes", always_run([(2, 6), (2, 16), (3, 16), (4, 16), (8, 16)], (2, 6)), ids=str)
def test_every_share_of_a_batch_can_run(sizes):
    """On any number of replicas up to that of the micro-batches, every schedule runs what the largest share needs."""
    pp, most = sizes
    proved = {}
    for name, schedule in SCHEDULES.items():
        vp = schedule.vp or (2 if schedule.grouped else 1)
        # Dense models run no pairs, and experts' as many micro-batches.
        plain = name.removesuffix("-overlap")
        model, parallel = ModelConfig(num_layers=16), ParallelConfig(pp=pp, vp=vp, schedule=plain)
        counts = set()
        for microbatches in range(1, most + 1):
            cfg = StepConfig(model, parallel, TrainConfig(global_batch_size=2 * microbatches, micro_batch_size=2))
            for dp in range(1, microbatches + 1):
                passes, largest = cfg.num_microbatches(dp), -(-microbatches // dp)
                assert largest <= passes < largest + (pp if schedule.grouped and microbatches % dp else 1)
                # Equal shares that interleaved cannot run are refused, as without replicas.
                if not schedule.grouped or microbatches % dp:
                    counts.add(passes)
        for passes in counts:
            validate(build_schedule(name, pp, vp, passes))
        proved[name] = len(counts)
    # Interleaved runs multiples of pp, here for the uneven shares of at most two replicas.
    assert proved == {name: -(-(most // 2) // pp) if s.grouped else most for name, s in SCHEDULES.items()}


costs_or_zero = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


def _replan(schedule, costs):
    orders = [[op for op in program if op.is_compute] for program in schedule.programs]
    return replace(schedule, programs=lower(orders, schedule.placement, costs))


@settings(max_examples=50, deadline=None)
@given(configurations(), st.builds(Costs, *[costs_or_zero] * 4))
def test_any_lowering_is_valid_under_all_transports(configuration, plan):
    """Whatever the plan costs, zeros included: they move transfers only."""
    schedule = build_schedule(*configuration)
    replanned = _replan(schedule, plan)
    assert [[op for op in p if op.is_compute] for p in replanned.programs] == [
        [op for op in p if op.is_compute] for p in schedule.programs
    ]
    assert [Counter(p) for p in replanned.programs] == [Counter(p) for p in schedule.programs]
    validate(replanned)


@settings(max_examples=50, deadline=None)
@given(
    configurations(max_m=10),
    st.builds(
        Costs,
        *[st.floats(0.05, 3.0)] * 3,
        transfer=st.floats(0.0, 2.0),
        jitter=st.floats(0.0, 0.5),
        seed=st.integers(0, 99),
    ),
)
def test_makespan_grows_with_what_the_transport_serialises(configuration, costs):
    schedule = build_schedule(*configuration)
    runs = {mode: simulate(schedule, costs, mode) for mode in MODES}
    spans = [runs[mode].makespan for mode in ("free", "dir", "blocking")]
    assert spans == sorted(spans)
    assert all(run.makespan >= run.ideal * (1 - 1e-9) for run in runs.values())


def test_lowering_names_orders_that_wait_in_a_cycle():
    place = build_schedule("1f1b", 2, 1, 2).placement
    orders = [[Op("F", 0, 0), Op("B", 0, 0), Op("F", 1, 0), Op("B", 1, 0)]]
    orders.append([Op("F", 0, 1), Op("F", 1, 1), Op("B", 0, 1), Op("B", 1, 1)])
    with pytest.raises(ValueError, match=r"cycle, stuck at B0.0, F1.1"):
        lower(orders, place)


def test_memory_bound():
    schedule = build_schedule("gpipe", 2, 1, 4)
    validate(schedule, max_activations=[4, 4])
    with pytest.raises(InvalidScheduleError, match="rank 1 holds 4 chunk activations, more than 3"):
        validate(schedule, max_activations=[4, 3])


MUTATED = [("1f1b", 3, 1, 4), ("interleaved", 2, 2, 4), ("zb-h1", 3, 1, 4), ("zb-v", 3, 2, 5), ("gpipe", 2, 2, 2)]
PAIRED = [("1f1b-overlap", 3, 1, 8), ("interleaved-overlap", 2, 2, 6), ("1f1b-overlap", 1, 1, 3)]
MUTATED += PAIRED[:1]


def _with_program(schedule, rank, program):
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize("configuration", [*MUTATED, PAIRED[1]])
def test_every_deletion_doubling_and_retargeting_is_refused(configuration):
    """At every position of every program: no such mutant passes, whichever transport."""
    schedule = build_schedule(*configuration)
    rng = random.Random(0)
    for rank, program in enumerate(schedule.programs):
        for i, op in enumerate(program):
            twice = rng.randrange(len(program) + 1)
            mutants = [
                program[:i] + program[i + 1 :],
                program[:twice] + (op,) + program[twice:],
                program[:i]
                + (op._replace(microbatch=(op.microbatch + 1) % schedule.num_microbatches),)
                + program[i + 1 :],
                program[:i] + (op._replace(stage=(op.stage + 1) % schedule.placement.num_stages),) + program[i + 1 :],
                program[:i]
                + (op._replace(peer=rank if op.peer is None else (op.peer + 1) % schedule.pp),)
                + program[i + 1 :],
                program[:i] + (op._replace(kind="X" + op.kind[1:]),) + program[i + 1 :],
            ]
            for mutant in mutants:
                with pytest.raises(InvalidScheduleError):
                    validate(_with_program(schedule, rank, mutant), modes=["free"])


@pytest.mark.parametrize("configuration", [*PAIRED, ("1f1b", 2, 1, 4)])
def test_only_a_forward_beside_a_backward_pass_of_another_micro_batch_is_a_pair(configuration):
    """A mark at any op of any rank is refused unless that is what it marks."""
    schedule = build_schedule(*configuration)
    marked = 0
    for rank, program in enumerate(schedule.programs):
        marked += sum(op.beside for op in program)
        for i, op in enumerate(program):
            if op.beside:
                continue
            mutant = _with_program(schedule, rank, (*program[:i], op._replace(beside=True), *program[i + 1 :]))
            kinds = [(x.kind, x.microbatch) for x in program[i : i + 2]]
            if [kind for kind, _ in kinds] == ["F", "B"] and kinds[0][1] != kinds[1][1]:
                validate(mutant)
                continue
            with pytest.raises(InvalidScheduleError):
                validate(mutant)
    assert bool(marked) == schedule.name.endswith("-overlap")


@pytest.mark.parametrize("configuration", PAIRED[:2])
def test_a_pair_begins_with_the_inputs_of_both(configuration):
    """Messages that take long: in time, too, neither pass of a pair has begun before they are there."""
    simulation = simulate(build_schedule(*configuration), Costs(transfer=3.0))
    placement = simulation.schedule.placement
    arrived = {(e.op.kind[1], e.op.stage, e.op.microbatch): e.finish for e in simulation.transfers}
    begun = {(e.rank, e.op): e.start for e in simulation.compute}
    waited = 0
    for rank, program in enumerate(simulation.schedule.programs):
        for op, following in pairwise(program):
            needed = needed_by(following, placement.num_stages) if op.beside else None
            if needed in arrived:
                assert begun[rank, op] >= arrived[needed]
                waited += begun[rank, op] == arrived[needed]
    assert waited


def test_a_transfer_within_a_rank_is_refused():
    schedule = build_schedule("zb-v", 2, 2, 3)
    program = schedule.programs[1]
    at = program.index(Op("F", 0, 1)) + 1
    extra = (Op("SF", 0, 1, 1), Op("RF", 0, 2, 1))
    with pytest.raises(InvalidScheduleError, match="no operation consumes SF0.1@1, RF0.2@1"):
        validate(_with_program(schedule, 1, program[:at] + extra + program[at:]))


class Deadlocked(Exception):
    pass


class SerialComm:
    """Unbuffered, untagged transfers between threads: each blocks both sides. Knows when nobody can go on."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition()
        self.offers: dict[int, tuple[str, int, str]] = {}  # rank -> (side, peer, data) it waits with
        self.results: dict[int, str] = {}
        self.running = ranks
        self.dead = False

    def transfer(self, rank: int, side: str, peer: int, data: str = "") -> str:
        with self.changed:
            other = self.offers.get(peer)
            if other is not None and other[0] != side and other[1] == rank:
                del self.offers[peer]
                self.results[peer] = data
                self.changed.notify_all()
                return other[2]
            self.offers[rank] = (side, peer, data)
            self._check()
            self.changed.wait_for(lambda: rank in self.results or self.dead)
            if rank not in self.results:
                raise Deadlocked
            return self.results.pop(rank)

    def leave(self) -> None:
        with self.changed:
            self.running -= 1
            self._check()

    def _check(self) -> None:
        if self.running and len(self.offers) == self.running:
            self.dead = True
            self.changed.notify_all()


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _run_on_threads(schedule) -> dict[int, str]:
    """Runs the programs, a thread per rank that blocks at each transfer. Data are chains of hashes of all that they
    are made from. Returns each stage's weight gradient, the chain over its micro-batches."""
    place, comm = schedule.placement, SerialComm(schedule.pp)
    gradients: dict[int, str] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        made: dict[tuple[str, int, int], str] = {}  # ("F" or "B", stage that made it, micro-batch)
        saved: dict[tuple[int, int], str] = {}
        deferred: dict[tuple[int, int], str] = {}
        try:
            for kind, mb, stage, peer, _ in schedule.programs[rank]:
                if kind in ("SF", "SB"):
                    comm.transfer(rank, "S", peer, made.pop((kind[1], stage, mb)))
                elif kind in ("RF", "RB"):
                    source = stage - 1 if kind == "RF" else stage + 1
                    made[kind[1], source, mb] = comm.transfer(rank, "R", peer)
                elif kind == "F":
                    x = made.pop(("F", stage - 1, mb)) if stage else _digest("batch", mb)
                    saved[stage, mb] = made["F", stage, mb] = _digest("F", stage, x)
                elif kind == "W":
                    gradients[stage] = _digest(gradients.get(stage), deferred.pop((stage, mb)))
                else:
                    last = stage == place.num_stages - 1
                    g = _digest("loss", made.pop(("F", stage, mb))) if last else made.pop(("B", stage + 1, mb))
                    made["B", stage, mb] = dx = _digest("B", stage, g, saved.pop((stage, mb)))
                    deferred[stage, mb] = dx
                    if kind == "B":
                        gradients[stage] = _digest(gradients.get(stage), deferred.pop((stage, mb)))
        except BaseException as e:
            errors.append(e)
        finally:
            comm.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(schedule.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    if errors:
        raise next((e for e in errors if not isinstance(e, Deadlocked)), errors[0])
    return gradients


def _expected_gradients(num_stages: int, m: int) -> dict[int, str]:
    """The same by plain loops, one micro-batch after the other."""
    gradients: dict[int, str] = {}
    for mb in range(m):
        x, outputs = _digest("batch", mb), []
        for stage in range(num_stages):
            x = _digest("F", stage, x)
            outputs.append(x)
        g = _digest("loss", x)
        for stage in reversed(range(num_stages)):
            g = _digest("B", stage, g, outputs[stage])
            gradients[stage] = _digest(gradients.get(stage), g)
    return gradients


@settings(max_examples=25, deadline=None)
@given(configurations(max_pp=4, max_vp=3, max_m=8))
def test_schedules_run_on_blocking_untagged_channels(configuration):
    schedule = build_schedule(*configuration)
    assert _run_on_threads(schedule) == _expected_gradients(schedule.placement.num_stages, schedule.num_microbatches)


@pytest.mark.parametrize("configuration", MUTATED)
def test_swaps_run_if_and_only_if_accepted(configuration):
    """Two ops of a program change places. What passes must run and give the right gradients; what is refused for a
    deadlock must deadlock on the threads."""
    schedule = build_schedule(*configuration)
    expected = _expected_gradients(schedule.placement.num_stages, schedule.num_microbatches)
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    for _ in range(60):
        rank = rng.randrange(schedule.pp)
        program = list(schedule.programs[rank])
        i = rng.randrange(len(program) - 1)
        j = min(i + rng.choice((1, 1, 2, 3)), len(program) - 1)
        program[i], program[j] = program[j], program[i]
        mutant = _with_program(schedule, rank, program)
        try:
            validate(mutant)
        except InvalidScheduleError:
            outcomes["refused"] += 1
        except DeadlockError:
            outcomes["deadlock"] += 1
            with pytest.raises(DeadlockError):
                validate(mutant, modes=["blocking"])
            with pytest.raises(Deadlocked):
                _run_on_threads(mutant)
        else:
            outcomes["accepted"] += 1
            assert _run_on_threads(mutant) == expected
    assert outcomes["accepted"] > 3
    assert outcomes["refused"] > 10


def _send_first_1f1b():
    """1F1B as it is often written: send as soon as made, receive right before use."""
    schedule = build_schedule("1f1b", 2, 1, 4)
    programs = []
    for rank, program in enumerate(schedule.programs):
        transfers = {(op.kind, op.microbatch): op for op in program if not op.is_compute}
        written = []
        for op in (op for op in program if op.is_compute):
            before, after = transfers.get(("R" + op.kind, op.microbatch)), transfers.get(("S" + op.kind, op.microbatch))
            written += [x for x in (before, op, after) if x is not None]
        assert Counter(written) == Counter(program), rank
        programs.append(tuple(written))
    return replace(schedule, programs=tuple(programs))


def test_send_first_1f1b_deadlocks_where_sends_block_and_only_there():
    schedule = _send_first_1f1b()
    validate(schedule, modes=["free"])
    simulate(schedule, mode="free")
    with pytest.raises(DeadlockError, match="which waits for") as caught:
        validate(schedule, modes=["blocking"])
    # The cycle names the two sends that block each other: a forward's output and a gradient.
    assert {"SF1.0@1 on rank 0", "SB0.1@0 on rank 1"} <= set(caught.value.cycle)
    with pytest.raises(Deadlocked):
        _run_on_threads(schedule)
