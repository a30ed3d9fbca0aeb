"""Wide & deep on the parameter server of PaddlePaddle 2.6.2, async; runs as server or worker, as its launcher says."""

import numpy as np
import paddle
from paddle import static
from paddle.distributed import fleet
from paddle.nn.functional import relu

from benchmarks.parameter_server.work import DENSE, DIM, KEYS, LEARNING_RATE, SLOTS, WIDTHS, batches, time_steps


def build():
    """Return the mean loss of a batch, as nodes of the default program."""
    slots = [static.data(f"slot{i}", [None, 1], "int64") for i in range(SLOTS)]
    dense = static.data("dense", [None, DENSE], "float32")
    click = static.data("click", [None, 1], "float32")
    shared = paddle.ParamAttr(name="table", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = [static.nn.sparse_embedding(slot, size=[KEYS, DIM], param_attr=shared) for slot in slots]
    hidden = paddle.concat([*(paddle.reshape(row, [-1, DIM]) for row in rows), dense], axis=1)
    for width in WIDTHS[1:-1]:
        hidden = relu(static.nn.fc(hidden, width))
    logit = static.nn.fc(hidden, 1) + static.nn.fc(dense, 1)
    return paddle.nn.functional.binary_cross_entropy_with_logits(logit, click)


def main() -> None:
    """Serve, or train the timed steps."""
    paddle.enable_static()
    fleet.init(fleet.PaddleCloudRoleMaker(is_collective=False))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    loss = build()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(LEARNING_RATE), strategy)
    optimizer.minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    executor = static.Executor(paddle.CPUPlace())
    executor.run(static.default_startup_program())
    fleet.init_worker()
    worker = fleet.worker_index()
    feeds = [
        {f"slot{i}": np.ascontiguousarray(ids[:, i : i + 1]) for i in range(SLOTS)} | {"dense": dense, "click": click}
        for ids, dense, click in batches(worker)
    ]
    program = static.default_main_program()
    time_steps(worker, lambda number: float(executor.run(program, feed=feeds[number], fetch_list=[loss])[0]))
    fleet.stop_worker()


if __name__ == "__main__":
    main()
