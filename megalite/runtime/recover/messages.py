"""Messages between trainers, guards and the hub, a type each, and their one codec. Standard library only.

Named tuples, as a guard starts in some 20 ms: dataclasses would take as long again to be made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

from megalite.runtime.base.untrusted import BadFile, parse_json

Address = tuple[str, int]
"""Host and port of a keeper; the host is "" where it is the hub's."""

Copy = tuple[int, int]
"""Number and step of a copy."""

# --------------------------------------------------------------------------------- of a trainer or standby to its guard


class Here(NamedTuple):
    """All is imported: the process waits for its turn."""


class Listen(NamedTuple):
    """The guard is to be the hub.

    Attributes:
        world: number of ranks.
        limit: recoveries before the run is given up.
        alone: whether no other host has ranks.
        elsewhere: whether copies are kept on other hosts too, and reserves take the place of guards that are gone.
        unit: the number of ranks may be any multiple of this, where a lost one cannot be replaced; 0: it stays.
        fewest: ranks without which the run saves, and ends.
        grow_after: seconds from a change of the number of ranks, or a recovery, to growth.
        identity: what reserves must be, too: a digest of options and code.
        folder: of the files in `succession`; "" where the run ends with the hub.
    """

    world: int
    limit: int
    alone: bool
    elsewhere: bool
    unit: int = 0
    fewest: int = 0
    grow_after: float = 0.0
    identity: str = ""
    folder: str = ""


class Meet(NamedTuple):
    """The guard is to connect to the hub, as that of a rank, or with -1 in reserve.

    Attributes:
        leaves: whether the run goes on without a host that is told to stop.
        identity: see `Listen`.
        data: see `Data`.
        folder: see `Listen`, as this host names it.
    """

    rank: int
    host: str
    port: int
    token: str
    elsewhere: bool
    leaves: bool = False
    identity: str = ""
    data: str = ""
    folder: str = ""


class Data(NamedTuple):
    """What rank 0 trains on and evaluates, as a digest: that of reserves must be the same."""

    digest: str


class Ready(NamedTuple):
    """SIGTERM is a request to save and stop from here on."""


class Leaving(NamedTuple):
    """All is done since this time; 0: there is more to do."""

    since: float


class Slots(NamedTuple):
    """Memory for copies comes with this, as descriptors."""


class Commit(NamedTuple):
    """Copy `number`, of the state after `step`, is whole.

    Attributes:
        slot: index of the memory that it is in.
        room: bytes of a slot.
        bytes: those that it takes, from the slot's beginning.
        crc: of the JSON in it.
        run_id: of the run whose state it is.
        text: bytes of the JSON, which ends it.
    """

    number: int
    step: int
    slot: int
    room: int
    bytes: int
    crc: int
    run_id: str
    text: int = 0


class Void(NamedTuple):
    """Copy `number` is about to be written over."""

    number: int


class Loaded(NamedTuple):
    """The run goes on from copy `number`, or with -1 from none: later ones are void."""

    number: int


class Lost(NamedTuple):
    """The connection to another rank is lost."""


class Paused(NamedTuple):
    """The trainer has copied its state, and waits for the next round; the hub hears it once another host has that."""

    round: int


# ------------------------------------------------------------------------------------------------ of a guard to the hub


class Hello(NamedTuple):
    """First words of a guard.

    Attributes:
        rank: -1 in reserve.
        token: of the hub.
        network: stack that the guard's host uses.
        port: of the guard's keeper; 0 without one.
        host: its name.
        identity: see `Listen`; of those in reserve.
        data: see `Data`; of those in reserve.
    """

    rank: int
    token: str
    network: str
    port: int = 0
    host: str = ""
    identity: str = ""
    data: str = ""


class Broken(NamedTuple):
    """A round is broken, as the rank died, or lost a connection."""

    round: int
    cause: str
    died: bool


class Killed(NamedTuple):
    """Nothing of the rank trains any more.

    Attributes:
        held: copies of the rank.
        kept: copies of other ranks, each with its rank.
        lent: all that the guard's keeper can hand out, each with its layout and rank: those, and of earlier layouts.
    """

    round: int
    held: Sequence[Copy]
    kept: Sequence[tuple[int, Sequence[Copy]]]
    lent: Sequence[tuple[int, int, Sequence[Copy]]] = ()


class Done(NamedTuple):
    """The trainer has ended, with all done."""

    round: int


class Final(NamedTuple):
    """The trainer has ended with the code of an error."""

    code: int


class Taken(NamedTuple):
    """The guard has heard that the round begins."""

    round: int


class Began(NamedTuple):
    """The first copy of the round is whole on another host, too: the rank needs no earlier one any more."""

    round: int


class Leaves(NamedTuple):
    """This host was told to stop."""


class HubState(NamedTuple):
    """What another guard must know to be the hub, of which all tell it what they know.

    Attributes:
        listen: the run's sizes and rules.
        number: of the hub; 0 is the first one.
        round: of the last "go"; -1: the run ends with this hub.
        layout: of that round.
        worlds: each layout that there has been, and its number of ranks.
        recoveries: so far.
        data: see `Data`.
        host, network: of the hub's host, its name and network stack.
        here: number of ranks on that host, the first ones.
        others: number of guards on other hosts.
        address: where the others reach the guard that is told, "" where they reach the hub.
        leaves: whether the hub's host was told to stop: all trainers wait, and all guards come to the next hub.
    """

    listen: Listen
    number: int
    round: int
    layout: int
    worlds: Sequence[tuple[int, int]]
    recoveries: int
    data: str
    host: str
    network: str
    here: int
    others: int
    address: str = ""
    leaves: bool = False


# ------------------------------------------------------------------------------------------------ of the hub to a guard


class Break(NamedTuple):
    """A round is broken: trainers are killed."""

    round: int


class Go(NamedTuple):
    """A round begins.

    Attributes:
        numbers: of the copies that all ranks have, from one of which the run goes on.
        ranks: those that died.
        cause: of the death.
        died: when, as `time.monotonic` on rank 0's host.
        gone: when all trainers were gone.
        gave_up: why only a save is left to do; "" if there is more.
        on_cpu: whether that save is made on the CPU.
        rank: of the guard from here on; -1 in reserve.
        buddy: keeper of the rank's copies from here on; None where copies stay on their host.
        fetch: keeper that has the rank's copies; None where its guard has them, or there are none.
        layout: number of the layout that ranks are of: that of the round in which it was first.
        world: number of ranks; 0: the launcher's.
        was: number of ranks before, where the layout is new; else 0.
        reserve: number of ranks that wait.
        source: layout of the copies with these numbers, where it is another one.
        lenders: of each rank of that layout, the keeper that has its copies.
        store: where the processes of the round meet; None: where the launcher says.
    """

    round: int = 0
    numbers: Sequence[int] = ()
    ranks: Sequence[int] = ()
    cause: str = ""
    died: float = 0.0
    gone: float = 0.0
    gave_up: str = ""
    on_cpu: bool = False
    rank: int = -1
    buddy: Address | None = None
    fetch: Address | None = None
    layout: int = 0
    world: int = 0
    was: int = 0
    reserve: int = 0
    source: int = 0
    lenders: Sequence[Address] = ()
    store: Address | None = None


class Buddy(NamedTuple):
    """The keeper at this address gets the rank's copies; None where copies stay on their host."""

    address: Address | None


class Pause(NamedTuple):
    """The trainer is to copy its state after a step that all agree on, and to wait; its guard tells it."""


class Stop(NamedTuple):
    """What told this host to stop tells the whole run."""


class Refuse(NamedTuple):
    """One that asked to be in reserve is not taken; `why` is for the user."""

    why: str


class StandIn(NamedTuple):
    """One more guard is to be started in reserve."""


class End(NamedTuple):
    """The run ends with a code; or only for one in reserve, which was waited for in vain.

    Attributes:
        code: a negative one is that of a signal.
        why: for the user; "" if the trainer says it.
        kill: whether the trainer is not asked to end by itself.
    """

    code: int
    why: str
    kill: bool


# --------------------------------------------------------------------------------- of a guard to its trainer or standby


class Wait(NamedTuple):
    """No turn yet; `alone`: the guard does not know the hub."""

    alone: bool = False


class Turn(NamedTuple):
    """The standby is the trainer from here on; its slots come with this, as descriptors.

    Attributes:
        go: of the round.
        spares: number of ranks in reserve at the start.
        copies: the whole ones in the slots.
        run_id: of the run that they are from; "" without any.
        began: when the first trainer of the rank was ready, as `time.monotonic`; 0 before.
        token: of all keepers, for copies that are brought by the trainer itself; "" where there are none.
        serves: whether the store of the round is this process's: the last descriptor listens.
    """

    go: Go = Go()
    spares: int = 0
    copies: Sequence[Commit] = ()
    run_id: str = ""
    began: float = 0.0
    token: str = ""
    serves: bool = False


class Listening(NamedTuple):
    """The hub can be met."""

    port: int
    token: str


class Kept(NamedTuple):
    """Copy `number` is whole on another host; a keeper says so to its guard, too."""

    number: int


class Leave(NamedTuple):
    """The run is to end: no kill comes."""


# ----------------------------------------------------------------------------- of a guard to another's keeper, and back


class Keep(NamedTuple):
    """Copies of a rank follow, each a `Commit` and as many bytes; the answers are a `Have`, and a `Kept` for each."""

    token: str
    rank: int
    round: int
    layout: int = 0


class Fetch(NamedTuple):
    """Copies of a rank with these numbers are to be sent, each a `Commit` and as many bytes."""

    token: str
    rank: int
    numbers: Sequence[int]
    layout: int = 0


class Borrow(NamedTuple):
    """Parts of a copy are to be sent: the answer is its `Commit`, then the bytes of each `Range` that is asked for."""

    token: str
    layout: int
    rank: int
    number: int


class Range(NamedTuple):
    """So many bytes of a copy, from this one on."""

    at: int
    bytes: int


class Have(NamedTuple):
    """Number and crc of each copy that is there."""

    copies: Sequence[tuple[int, int]]


FromTrainer = Here | Listen | Data | Meet | Ready | Leaving | Slots | Commit | Void | Loaded | Lost | Paused
ToTrainer = Wait | Turn | Listening | Kept | Pause | Leave
FromGuard = Hello | Broken | Killed | Done | Final | Taken | Began | Paused | Leaves | HubState
FromHub = Break | Go | Buddy | Pause | Stop | Refuse | StandIn | End | HubState
WithKeeper = Keep | Fetch | Borrow | Range | Have | Commit | Kept
Message = FromTrainer | ToTrainer | FromGuard | FromHub | WithKeeper

_KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as one line of JSON, without its end: name of the type, then fields."""
    return json.dumps([type(message).__name__, *message]).encode()


def decode(line: bytes) -> Message:
    """Return the message that a line is; sequences in it are lists.

    Raises:
        BadFile: no guard says this.
    """
    try:
        name, *fields = parse_json(line)
        message = _KINDS[name](*fields)
        if isinstance(message, Turn):
            copies = [Commit(*copy) for copy in message.copies]
            return message._replace(go=Go(*message.go), copies=copies)
        if isinstance(message, HubState):
            return message._replace(listen=Listen(*message.listen))
        return message
    except (TypeError, ValueError, KeyError):
        raise BadFile("is no message of a guard") from None
