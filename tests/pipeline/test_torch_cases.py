"""What passes with torch's stage in torch's own test cases passes with ours, to the same bits without a codec."""

import runpy

import pytest

from support.pages import ROOT
from support.processes import run
from support.toy import needs_inference

TORCH_FAILS = "test_eval_inference_mode[ScheduleZBVZeroBubble]"
OFTEN = [
    "test_stage: test_custom_dw_with_fb_schedule",
    "test_stage: test_custom_dw_errors",
    "test_stage: test_output_chunks_memory_usage",
    "test_forward_only",
    TORCH_FAILS,
]
"""Those that no other test has; docs/measured/torch_cases.py has all."""


def of_case(rank, case, *makes):
    known = runpy.run_path(str(ROOT / "docs" / "measured" / "torch_cases.py"), run_name="torch_cases")
    return [[each.tolist() for each in known["CASES"][case](known[make])] for make in makes]


@needs_inference
@pytest.mark.processes
@pytest.mark.parametrize("case", OFTEN)
def test_what_passes_with_torchs_stage_passes_with_ours(case):
    for found in run(of_case, 2, case, "ours", *([] if case == TORCH_FAILS else ["torchs"])):
        assert all(each == found[0] for each in found)
