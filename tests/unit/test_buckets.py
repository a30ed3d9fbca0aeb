"""How gradients are grouped for the all-reduce."""

from hypothesis import given
from hypothesis import strategies as st

from examples.resnet.model import ResNet
from phalanx.parallel.model_shape import shape_of
from phalanx.plan.buckets import FIRST_BUCKET_BYTES, all_reduce_buckets, cut_buckets
from phalanx.plan.rules.rules import plan_from_strategy
from phalanx.plan.shape import ParamShape
from phalanx.strategy import DistributedStrategy

MIB = 2**20


def params(sizes):
    return [ParamShape(name=f"p{i}", shape=(n,), dtype=dtype, item_bytes=4) for i, (n, dtype) in enumerate(sizes)]


@given(st.lists(st.tuples(st.integers(0, 3 * MIB), st.sampled_from(["float32", "bfloat16"]))), st.integers(1, 30))
def test_every_parameter_is_in_one_bucket_of_its_dtype_and_buckets_close_when_full(sizes, mib):
    made = params(sizes)
    buckets = cut_buckets(made, mib * MIB)
    assert sorted(i for b in buckets for i in b) == list(range(len(made)))
    for bucket in buckets:
        assert len({made[i].dtype for i in bucket}) == 1
        assert sum(made[i].bytes for i in bucket[:-1]) < mib * MIB
        assert bucket == sorted(bucket, reverse=True)


def test_the_first_bucket_is_small_so_that_communication_starts_early():
    buckets = cut_buckets(params([(MIB // 8, "float32")] * 16), 25 * MIB)
    assert sum(MIB // 2 for _ in buckets[0]) == FIRST_BUCKET_BYTES
    assert len(buckets) == 2


def counted(**settings):
    shape = shape_of(ResNet(class_dim=102, layers=50))
    buckets = all_reduce_buckets(plan_from_strategy(DistributedStrategy(**settings), shape, 2), shape)
    return sum(len(bucket.params) for bucket in buckets), len(buckets)


def test_resnet50_fuses_161_gradients_into_5():
    assert counted() == (161, 5)


def test_a_larger_fusion_size_makes_fewer_buckets():
    assert counted(fuse_grad_size_in_MB=64) == (161, 3)


def test_without_fusion_every_gradient_travels_alone():
    assert counted(fuse_all_reduce_ops=False) == (161, 161)
