"""One of two processes: its share of one step under DistributedDataParallel; rank 0 writes the gradients."""

import faulthandler
import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from stfseb import MAP, MLP, STFSEB, MCDropout

NUM_DATA, ROWS = 100, 24
OURS = 3  # exit code


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 5, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def seeded(rank, extractor):
    """A method of a process with a seed of its own, which nobody has reseeded."""
    torch.manual_seed(rank)
    net = MLP(5, 3, hidden=(16, 8), dropout=0.0)
    context = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
    given = torch.nn.Sequential(*list(net)[:-1]) if extractor == "callable" else extractor
    return STFSEB(net, context, num_context=16, samples=2, prior_weight=1.0, tau2=1.0, extractor=given)


def make(kind, rank=0):
    if kind.startswith("seeded"):
        return seeded(rank, kind.partition(" ")[2] or "init")
    torch.manual_seed(0)
    # Without dropout in data rows: their masks are every process's own. Context rows keep theirs through `reseed`.
    net = MLP(5, 3, hidden=(16, 8), dropout=0.0)
    context = torch.randn(50, 5)
    method = {
        "stfseb": lambda: STFSEB(net, context, num_context=16, samples=2, prior_weight=1.0),
        "epoch": lambda: STFSEB(net, context, num_context=16, samples=2, prior_weight=1.0, functional_scale="epoch"),
        "mcdropout": lambda: MCDropout(net, samples=2, prior_weight=1.0),
        "map": lambda: MAP(net),
    }[kind]()
    method.reseed(7)
    return method


def main(kind, rank, meeting, out):
    faulthandler.dump_traceback_later(50, exit=True)  # a process that hangs says where
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    x, y = batch()
    mine = slice(0, 15) if rank == 0 else slice(15, ROWS)  # unequal shares
    try:
        make(kind, rank)(x[mine], y[mine], num_data=NUM_DATA, batch_size=ROWS).backward()
    except Exception:
        traceback.print_exc()
        os._exit(OURS)  # alone it fails too: no fault of the meeting
    # A port, not a file: a file store hangs now and then when both processes come to it at once.
    store = dist.TCPStore("127.0.0.1", int(meeting), 2, is_master=rank == 0, timeout=timedelta(seconds=40))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
    method = make(kind, rank)
    parallel = DistributedDataParallel(method)
    total = parallel(x[mine], y[mine], num_data=NUM_DATA, batch_size=ROWS)
    (total * 2 / ROWS).backward()
    # Neither takes its group down: gloo's own ending has been seen to hang, and is not what is tested.
    if rank == 1:
        signal.pause()  # until the test ends it
    save_file({name: p.grad for name, p in method.named_parameters()}, out)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
