"""The ranks of one replica, joined: a store that all of them reach, and the two collectives that a model needs.

All ranks of a group are processes of one machine, and everything between them stays on loopback addresses (and NVLink).
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shared.config import BadConfig

HOST = "127.0.0.1"
JOIN_S = 120.0  # the others may still be importing torch
RESTART_EXIT = 1  # this process is of no use any more; a new one may be


class Seat(NamedTuple):
    """What a rank is told by its launcher."""

    rank: int
    size: int
    group: int  # a number of this group's own: ranks of different groups never become one replica
    port: int  # of the store
    listener: int  # rank 0: descriptor of the store's listening socket


class Collectives(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[Tensor], options: c10d.AllreduceOptions) -> c10d.Work | None: ...

    def _allgather_base(self, output: Tensor, mine: Tensor, options: c10d.AllgatherOptions) -> c10d.Work | None: ...


class GroupError(RuntimeError):
    """The ranks cannot work together (any more); a new group may."""


@dataclass(frozen=True, kw_only=True)
class Group:
    rank: int
    size: int
    number: int  # of this group: see Seat
    port: int
    collectives: Collectives

    def store(self, timeout_s: float) -> c10d.TCPStore:
        """A connection of its own for one thread."""
        return c10d.TCPStore(HOST, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))

    def sum_into(self, x: Tensor) -> Tensor:
        """x becomes the sum of all ranks' x; every rank gets the same bits."""
        options = c10d.AllreduceOptions()
        options.asyncOp = False  # on a GPU: on the current stream
        _finish(self.collectives.allreduce([x], options))
        return x

    def join_columns(self, x: Tensor, width: int, total: int) -> Tensor:
        """x [S, up to width] of every rank -> [S, total], side by side in the order of the ranks."""
        rows = x.shape[0]
        mine = F.pad(x, (0, width - x.shape[1])).contiguous()
        every = mine.new_empty((self.size, rows, width))
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        _finish(self.collectives._allgather_base(every.view(-1), mine.view(-1), options))
        return every.transpose(0, 1).reshape(rows, self.size * width)[:, :total].contiguous()


def _finish(work: c10d.Work | None) -> None:
    if work is not None:
        work.wait()


def leave(why: str) -> NoReturn:
    """End this process at once, whatever its threads and its device are waiting for: its group is broken."""
    print(f"gpu_worker: {why}", file=sys.stderr, flush=True)
    os._exit(RESTART_EXIT)


def join(seat: Seat, device: torch.device, dtype: torch.dtype, step_timeout_s: float) -> Group:
    """Meet the other ranks; GroupError when they do not come in time, BadConfig when they compute in another way."""
    timeout = timedelta(seconds=JOIN_S)
    try:
        if seat.rank == 0:
            store = c10d.TCPStore(
                HOST, seat.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=seat.listener
            )
        else:
            store = c10d.TCPStore(HOST, seat.port, is_master=False, wait_for_workers=False, timeout=timeout)
        store.set(f"here/{seat.rank}", f"{device.type} in {str(dtype).removeprefix('torch.')}")
        kinds = [store.get(f"here/{rank}").decode() for rank in range(seat.size)]
        if kinds[seat.rank] != kinds[0]:
            raise BadConfig(f"rank {seat.rank} computes on {kinds[seat.rank]}, rank 0 on {kinds[0]}")
        collectives = _collectives(seat, c10d.PrefixStore("collectives", store), device, step_timeout_s)
        group = Group(rank=seat.rank, size=seat.size, number=seat.group, port=seat.port, collectives=collectives)
        group.sum_into(torch.ones(1, device=device))  # NCCL connects at its first use
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise GroupError(f"rank {seat.rank} of {seat.size} did not meet the others in {JOIN_S:.0f} s: {reason}") from None
    return group


def _collectives(seat: Seat, store: c10d.Store, device: torch.device, step_timeout_s: float) -> Collectives:
    """NCCL on GPUs, gloo on a CPU, without the process-wide state of torch.distributed."""
    api: Any = c10d  # its type stubs lack much of it
    kind = api.ProcessGroupNCCL if device.type == "cuda" else api.ProcessGroupGloo
    options = api.ProcessGroupNCCL.Options() if device.type == "cuda" else api.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=step_timeout_s)
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    else:
        options._devices = [api.ProcessGroupGloo.create_device(hostname=HOST)]
    return cast(Collectives, kind(store, seat.rank, seat.size, options))
