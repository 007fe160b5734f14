"""ModelScope is asked about models that its client has downloaded, and about no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from modelscope.hub.check_model import get_model_id_from_cache

from swift_megatron_grpo.arguments.environment import WRITTEN_BY_CLIENT, is_from_modelscope


@pytest.mark.parametrize("name", WRITTEN_BY_CLIENT)
def test_a_downloaded_model_names_its_origin(tmp_path: Path, name: str) -> None:
    assert not is_from_modelscope(str(tmp_path))
    (tmp_path / name).touch()
    assert is_from_modelscope(str(tmp_path))


def test_the_client_has_no_name_for_another_folder(tmp_path: Path) -> None:
    assert get_model_id_from_cache(str(tmp_path)) == "unknown"
