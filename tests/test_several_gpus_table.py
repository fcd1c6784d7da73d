"""benchmarks/several_gpus_table.py: docs/several-gpus.md has its tables as the memory model and results/ make them."""

import pytest
from helpers import benchmark


@pytest.mark.exhaustive  # the sizes of three models, counted on the meta device
def test_the_page_has_the_tables_of_today() -> None:
    with benchmark("several_gpus_table") as script:
        text = script.PAGE.read_text(encoding="utf-8")
        assert script.markers.all_filled(text, script.tables()) == text, "run: python benchmarks/several_gpus_table.py"
