"""Machine code is parsed, and the check of registers finds a product that is not waited for."""

from __future__ import annotations

import pytest

from tests.support.kernels.implementations import HAS_TRITON

if HAS_TRITON:
    from tests.kernels.static import sass

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR12], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def code(*lines: str) -> sass.Code:
    """Return code in which the lines "L0:", "L1:" are labels."""
    text = [
        f".L_x_{line[1:]}" if line.endswith(":") else f"        /*{16 * i:04x}*/                   {line} ;"
        for i, line in enumerate([*lines, "EXIT"])
    ]
    return sass.parse("\n".join(text))


def test_registers_of_a_product_are_free_after_its_wait() -> None:
    for use in ("FADD R1, R31, R2", "MOV R24, R1", "STS.128 [R1], R28", "STG.E.64 desc[UR4][R2.64], R30"):
        assert sass.touched_before_wait(code(PRODUCT, WAIT, use)) == []
        assert sass.touched_before_wait(code(PRODUCT, use, WAIT)), use


def test_an_operand_may_be_read_but_not_written() -> None:
    assert sass.touched_before_wait(code(PRODUCT, "FADD R1, R11, R2", WAIT)) == []
    for use in ("MOV R11, R1", "LDS.64 R10, [R1]", "LDSM.16.M88.4 R8, [R1]", "IMAD.WIDE R10, R1, R2, R4"):
        assert sass.touched_before_wait(code(PRODUCT, use, WAIT)), use


def test_other_registers_and_further_products_are_free() -> None:
    assert sass.touched_before_wait(code(PRODUCT, "FADD R1, R2, R32", "MOV R7, R12", PRODUCT, WAIT)) == []


def test_every_way_is_followed() -> None:
    assert sass.touched_before_wait(code("L0:", "MOV R1, R24", PRODUCT, "@P0 BRA `(.L_x_0)", WAIT))
    assert sass.touched_before_wait(code("L0:", "MOV R1, R24", PRODUCT, WAIT, "@P0 BRA `(.L_x_0)")) == []
    assert sass.touched_before_wait(code(PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, "L1:", "MOV R1, R24"))


def test_a_wait_that_leaves_groups_is_taken_for_none() -> None:
    assert sass.touched_before_wait(code(PRODUCT, WAIT.replace("0x0", "0x1"), "MOV R1, R24"))
