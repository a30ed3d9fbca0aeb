"""How many ranks a host runs, and which cards each gets."""

from __future__ import annotations

from phalanx.errors import LaunchError
from phalanx.launch.request.machine import Machine
from phalanx.launch.request.options import Options


def ranks_per_node(options: Options, machine: Machine) -> int:
    """Return how many workers this host runs in collective mode.

    What the user said; else one per card; else 1: on CPU one process already uses every core through its threads, and a
    second one changes the global batch, so that is never done unasked.

    Raises:
        LaunchError: If cards were asked for that are not there, or more ranks than cards.
    """
    cards = chosen_cards(options, machine)
    if options.nproc_per_node is None:
        return len(cards) or 1
    _check_enough(options.named("nproc_per_node"), options.nproc_per_node, cards)
    return options.nproc_per_node


def chosen_cards(options: Options, machine: Machine) -> tuple[str, ...]:
    """Return the cards of this job: those of `--gpus`, else every usable one, which `--gpus all` demands.

    Under CUDA_VISIBLE_DEVICES a card is called what that list calls it, as Fleet's launcher does.

    Raises:
        LaunchError: If `--gpus` cannot be had.
    """
    if options.gpus is None:
        return machine.usable_cards
    asked = tuple(part.strip() for part in options.gpus.split(",") if part.strip())
    if not asked:
        raise LaunchError(f"--gpus '{options.gpus}' lists no card. Write e.g. --gpus 0,1, or leave it out to use all.")
    _check_cuda(options, machine)
    if asked == ("all",):
        return machine.usable_cards
    for card in asked:
        if card not in machine.cards:
            limit = f" (limited by {machine.hidden_by})" if machine.hidden_by else ""
            offered = ", ".join(machine.cards)
            raise LaunchError(
                f"{options.named('gpus')} asks for card {card}, but this host offers {offered}{limit}. "
                "Choose among those."
            )
        if asked.count(card) > 1:
            raise LaunchError(f"--gpus lists card {card} twice. Each process needs a card of its own.")
    return asked


def _check_cuda(options: Options, machine: Machine) -> None:
    if machine.cards and machine.has_cuda_build:
        return
    if not machine.has_cuda_build:
        found = "the installed torch is a CPU build"
    else:
        found = f"no card is visible ({machine.hidden_by})" if machine.hidden_by else "no NVIDIA card was found"
    has_servers = any((options.server_num, options.worker_num, options.servers, options.workers))
    instead = "leave --gpus out: --worker_num says how many" if has_servers else "give the number of processes: -n 2"
    raise LaunchError(f"--gpus {options.gpus} needs CUDA, but {found}. To compute on the CPU, {instead}.")


def _check_enough(asked: str, count: int, cards: tuple[str, ...]) -> None:
    if cards and count > len(cards):
        raise LaunchError(
            f"{asked} asks for {count} processes, but there are {len(cards)} cards ({', '.join(cards)}). "
            f"Give at most {len(cards)}, or hide the cards with CUDA_VISIBLE_DEVICES= to run on CPU."
        )


def deal_cards(options: Options, machine: Machine, workers: int, *, only_if_asked: bool) -> tuple[tuple[str, ...], ...]:
    """Return the cards of each local worker, in order; empty on CPU.

    With more cards than workers the first workers get one more.

    Args:
        options: What the user typed.
        machine: What is there.
        workers: Workers on this host.
        only_if_asked: Parameter-server workers compute on CPU unless `--gpus` is given.

    Raises:
        LaunchError: If there are more workers than cards.
    """
    if not workers or (only_if_asked and options.gpus is None):
        return ()  # also where the same command runs on a host of servers, which needs no card
    cards = chosen_cards(options, machine)
    if not cards:
        return ()
    _check_enough(f"{workers} workers on this host", workers, cards)
    base, extra = divmod(len(cards), workers)
    dealt, start = [], 0
    for index in range(workers):
        size = base + (index < extra)
        dealt.append(cards[start : start + size])
        start += size
    return tuple(dealt)
