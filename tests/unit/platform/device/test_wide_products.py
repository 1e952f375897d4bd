"""bfloat16 products computed in float32 round once, leave other dtypes to torch, and have gradients."""

import subprocess
import sys

import pytest

# In a separate process: the kernels stay replaced until it ends.
PRELUDE = """
import torch
from megagrpo.platform.device import wide_products
g = torch.Generator().manual_seed(0)
a, b, c = (torch.randn(s, generator=g).bfloat16() for s in ((3, 40, 64), (3, 64, 50), (3, 40, 50)))
stock = a.float()[0] @ a.float()[0].t()
wide_products.install(torch.bfloat16)
wide_products.install(torch.bfloat16)
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


PRODUCTS = {
    "torch.mm(a[0], b[0])": "torch.mm(A[0], B[0])",
    "torch.mm(a[0], b[0], out=torch.empty(40, 50, dtype=torch.bfloat16))": "torch.mm(A[0], B[0])",
    "torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2)": "torch.addmm(C[0], A[0], B[0], beta=0.5, alpha=2)",
    "torch.bmm(a, b)": "torch.bmm(A, B)",
    "torch.baddbmm(c, a, b, alpha=0.25)": "torch.baddbmm(C, A, B, alpha=0.25)",
    "torch.nn.functional.linear(a, b[0].t())": "torch.nn.functional.linear(A, B[0].t())",
}


def test_a_product_is_the_exact_one_rounded_once():
    run(f"""
A, B, C = a.double(), b.double(), c.double()
for product, exact in {PRODUCTS}.items():
    found, exact = eval(product), eval(exact)
    assert found.dtype == torch.bfloat16, product
    one_rounding = exact.abs() * 2**-8 + 1e-5
    assert ((found.double() - exact).abs() <= one_rounding).all(), product
""")


@pytest.mark.full
def test_float32_products_are_torchs_own():
    run("assert torch.equal(a.float()[0] @ a.float()[0].t(), stock)")


@pytest.mark.full
def test_gradients_flow_in_bfloat16():
    run("""
x = a[0].clone().requires_grad_()
(x @ b[0]).sum().backward()
assert x.grad.dtype == torch.bfloat16
torch.testing.assert_close(x.grad, b[0].float().sum(1).expand(40, -1).bfloat16(), rtol=1e-2, atol=1e-2)
""")
