"""Hand-written backward passes against autograd and finite differences."""

import pytest
import torch
import torch.nn.functional as F

from megagrpo.policy.layers.elementwise import geglu, rms_norm, rotate, swiglu, xielu


def inputs(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def angles(length: int, dtype=torch.float64):
    turned = torch.arange(length, dtype=dtype)[:, None, None] * 0.7 ** torch.arange(4, dtype=dtype)
    return turned.cos(), turned.sin()


def test_rotation_is_multiplication_by_a_complex_number():
    (x,) = inputs((5, 3, 8))
    cos, sin = angles(5)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_rotation_may_leave_dimensions_alone_and_pair_neighbours():
    (x,) = inputs((5, 3, 12))
    cos, sin = angles(5)
    halves = rotate(x, cos, sin)
    torch.testing.assert_close(halves, torch.cat((rotate(x[..., :8], cos, sin), x[..., 8:]), -1))
    turned = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous()) * torch.complex(cos, sin)
    neighbours = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 8:]), -1)
    torch.testing.assert_close(rotate(x, cos, sin, interleaved=True), neighbours)


def test_norm_and_gated_unit_follow_their_formulas():
    x, weight = inputs((5, 2, 8), (8,))
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-3), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    )
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(swiglu(x), gate * torch.sigmoid(gate) * up)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(geglu(x), 0.5 * gate * (1 + torch.tanh(inner)) * up)


def test_gradients_are_those_of_finite_differences():
    x, weight = inputs((3, 2, 8), (8,))
    cos, sin = angles(3)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 1.3 * cos, 1.3 * sin), x)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 1.3 * cos[..., :3], 1.3 * sin[..., :3], interleaved=True), x)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(swiglu, x) and torch.autograd.gradcheck(geglu, x)


def test_xielu_is_transformers_and_its_gradients_are_those_of_finite_differences():
    from transformers.activations import XIELUActivation

    (x,) = inputs((6, 9))
    theirs = XIELUActivation(dtype=torch.float64)
    positive, negative = (F.softplus(p.detach()).requires_grad_() for p in (theirs.alpha_p, theirs.alpha_n))
    constants = theirs.beta.view(1), theirs.eps.view(1)
    ours = xielu(x, positive, theirs.beta + negative, *constants)
    torch.testing.assert_close(ours, theirs(x))
    for eps in (-1e-6, -0.5):  # many x lie between the second and 0
        constants = theirs.beta.view(1), torch.tensor([eps], dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda *p, fixed=constants: xielu(*p, *fixed), (x, positive, negative))
    narrow = xielu(x.bfloat16(), positive.bfloat16(), negative.bfloat16(), *(one.bfloat16() for one in constants))
    assert narrow.dtype == torch.bfloat16


def test_views_and_their_gradients_are_those_of_copies():
    wide, weight = inputs((4, 3, 24), (8,))
    view = wide[..., 8:16]
    cos, sin = angles(4)
    for function in (lambda x: rotate(x, cos, sin), lambda x: rms_norm(x, weight, 1e-3), swiglu, geglu):
        (grad,) = torch.autograd.grad(function(view).square().sum(), wide)
        copy = view.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(copy).square().sum(), copy)
        torch.testing.assert_close(grad[..., 8:16], expected)


@pytest.mark.parametrize("name", ["norm", "unit"])
def test_bfloat16_is_as_close_to_float64_as_autograd_is(name):
    ours, theirs = {
        "norm": (lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (64,), w, 1e-5)),
        "unit": (lambda x, w: swiglu(x) + 0 * w.sum(), lambda x, w: F.silu(x[..., :32]) * x[..., 32:] + 0 * w.sum()),
    }[name]
    x, weight = (t.detach().bfloat16().requires_grad_() for t in inputs((50, 64), (64,)))
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]

    def errors(function):
        out, truth = function(x, weight), theirs(*exact)
        grads = torch.autograd.grad(out.square().sum(), (x, weight))
        expected = torch.autograd.grad(truth.square().sum(), exact)
        return [float((a.double() - b).detach().norm()) for a, b in zip((out, *grads), (truth, *expected), strict=True)]

    assert all(own <= 1.1 * other + 1e-9 for own, other in zip(errors(ours), errors(theirs), strict=True))
