"""Which files of tests are not even imported."""

import pytest

from support.unwanted import nothing_wanted

EXCLUDED = {"processes", "namespaces", "slow"}


def test_files_that_mark_all_their_tests_with_what_is_excluded_are_left_out_and_no_others(request):
    """Of the files of this session; `make test` has all."""
    modules = {item.path: item.module for item in request.session.items}
    for path, module in modules.items():
        marks = getattr(module, "pytestmark", [])
        names = {mark.name for mark in (marks if isinstance(marks, list) else [marks])}
        for expression in (" and ".join(f"not {name}" for name in EXCLUDED), *(f"not {name}" for name in EXCLUDED)):
            assert nothing_wanted(path, expression) == any(f"not {name}" in expression for name in names & EXCLUDED), (
                path
            )


@pytest.mark.parametrize("expression", ["", "slow", "gpu", "not gpu", "not slow or gpu", "not (slow and gpu)"])
def test_files_are_left_out_for_plain_exclusions_only(tmp_path, expression):
    (tmp_path / "test_x.py").write_text("import pytest\n\npytestmark = [\n    pytest.mark.slow,\n]\n")
    assert nothing_wanted(tmp_path / "test_x.py", "not gpu and not slow")
    assert not nothing_wanted(tmp_path / "test_x.py", expression)
