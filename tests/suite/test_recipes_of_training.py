"""Steps by hand, on devices that are all the CPU: the recipes are right before anything is compared with them."""

from __future__ import annotations

import torch

from mgpu_check.oracles.training import gradient_exchange, models, training_steps

CPU = torch.device("cpu")


def test_chunks_cover_everything_in_order() -> None:
    for elements in range(12):
        for parts in range(1, 6):
            slices = gradient_exchange.chunks(elements, parts)
            assert len(slices) == parts
            assert [i for piece in slices for i in range(elements)[piece]] == list(range(elements))
            sizes = [piece.stop - piece.start for piece in slices]
            assert max(sizes) - min(sizes) <= 1


def test_shardwise_normalises_each_shard_by_itself() -> None:
    torch.manual_seed(0)
    net = torch.nn.BatchNorm1d(1, momentum=1.0, affine=True).double()
    net.weight.data.fill_(2.0)
    x = torch.tensor([[0.0], [2.0], [10.0], [30.0]], dtype=torch.float64)
    model = torch.nn.Sequential(net, torch.nn.Linear(1, 3).double())
    left = training_steps.shardwise_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        list(zip(x.split(2), torch.tensor([0, 1, 2, 0]).split(2), strict=True)),
    )
    assert [buffers["0.running_mean"].item() for buffers in left] == [1.0, 20.0]
    assert net.running_mean is not None
    assert net.running_mean.item() == 1.0, "the first shard's statistics stay"


def test_the_reference_starts_from_its_inputs() -> None:
    torch.manual_seed(3)
    model = models.mlp()
    inputs = training_steps.as_inputs(model, [(torch.randn(4, 6), torch.randint(0, 4, (4,)))])
    step = training_steps.on_one_device(models.mlp, 1, rate=0.0)
    results = step(inputs)
    assert all(torch.equal(results[name], value) for name, value in model.named_parameters())
    assert {
        value.dtype
        for value in step({n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}).values()
    } == {torch.float64}
