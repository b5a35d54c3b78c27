"""Every plan compiles to machine code for sm_80 and sm_90 that keeps to its registers and uses tensor cores."""

import re

import pytest

from guidevane_kernels.offline import MAX_SHARED_BYTES, compile_target, targets

TARGETS = [target for capability in MAX_SHARED_BYTES for target in targets(capability)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.name} {t.dtype} sm_{t.capability}".replace(" ", "-"))
def test_plan_compiles_without_spills_within_shared_memory(target):
    used = compile_target(target)

    assert (used.stack_bytes, used.local_accesses) == (0, 0), "registers spill"
    assert used.shared_bytes <= MAX_SHARED_BYTES[target.capability]
    assert re.search(r"arith\.muli .*(: i64|xi64>)", used.ttir), "no offset is computed in int64"
    if target.spec.kernel == "attend_tiles" and target.dtype == "bf16":
        uses_warp_groups = target.capability >= 90 and target.name.endswith("prefill")
        assert (used.num_hgmma if uses_warp_groups else used.num_hmma) > 0, "tensor cores are not used"
