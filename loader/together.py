"""Several pieces of waiting side by side, by as many threads as can be had; the caller's is one of them.

Ownership: the pieces are taken from one iterator and the results put into one list, both under a lock that
lives as long as the call; every thread has ended when it returns.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int, name: str
) -> list[Result]:
    """Return ``work(item)`` of each item, in order; where no thread can be started, one after the other.

    Parameters
    ----------
    work : callable
        What is done with each item.
    items : iterable
        The items.
    threads : int
        Most threads at a time, the caller's included.
    name : str
        What the threads are called.

    Raises
    ------
    BaseException
        The first that ``work`` raised; items not begun by then are left.
    """
    todo = list(items)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    lock, numbers = threading.Lock(), iter(range(len(todo)))

    def run() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                results[number] = work(todo[number])
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
                errors.append(error)

    helpers = [
        threading.Thread(target=run, name=f"{name}-{number}", daemon=True)
        for number in range(1, min(threads, len(todo)))
    ]
    with suppress(RuntimeError):  # no more threads are to be had: fewer will do
        for helper in helpers:
            helper.start()
    run()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(todo))]
