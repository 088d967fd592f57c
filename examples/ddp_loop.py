"""Two processes with DistributedDataParallel, over gloo on one machine (with CUDA: nccl, one process a card).

Every process takes its share of each step. DDP averages gradients, so each divides by its share of the step's
rows. `batch_size=` is the whole step's size. All processes have the first one's weights, context points and extractor.
"""

import os
import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import stfseb
from stfseb.data.embedded import read

ROWS, STEP = 1000, 64


def worker(rank: int, world: int, port: int, epochs: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    train = read("train").take(slice(0, ROWS))
    torch.manual_seed(rank)  # DistributedDataParallel starts from the first process's weights everywhere
    method = stfseb.STFSEB(stfseb.SmallCNN(dropout=0.2), context=read("kmnist"), samples=3)
    parallel = DistributedDataParallel(method)
    optimiser = torch.optim.Adam(method.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)  # masks of their own for data rows
    for epoch in range(epochs):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))  # the same order everywhere
        for step in order.split(STEP):
            mine = step[rank::world]
            total = parallel(train.images[mine], train.labels[mine], num_data=ROWS, batch_size=len(step))
            optimiser.zero_grad()
            (total * world / len(step)).backward()
            optimiser.step()
    if rank == 0:
        nll = stfseb.evaluate(method, read("validation").take(slice(0, 300)))["nll"]
        print(f"validation NLL {nll:.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main(epochs: int = 2) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (2, port, epochs), nprocs=2)


if __name__ == "__main__":
    main()
