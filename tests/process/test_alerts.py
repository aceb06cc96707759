"""Alert rules in Prometheus' own checker: each rule fires with its fault, but not without it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[2] / "packaging/alerts.yaml"
WELL = {
    'up{job="pipeswitch"}': "1x90",
    "pipeswitch_ready": "1x90",
    "pipeswitch_draining": "0x90",
    'pipeswitch_requests_total{outcome="ok"}': "0+100x90",
    'pipeswitch_requests_total{outcome="error"}': "0+1x90",
    'pipeswitch_requests_total{outcome="queue_full"}': "0x90",
    "pipeswitch_queue_full_total": "0x90",
    "pipeswitch_gateway_queue_full_total": "0x90",
    "pipeswitch_worker_restarts_total": "1x90",
    "pipeswitch_daemon_restarts_total": "0x90",
    'pipeswitch_memory_free_bytes{tier="host"}': "500x90",
    'pipeswitch_memory_capacity_bytes{tier="host"}': "1000x90",
    'pipeswitch_job_step{state="running",exported_job="j"}': "0+60x90",
    'pipeswitch_job_persisted_step{state="running",exported_job="j"}': "0+59x90",
}
FAULTS = {
    "PipeSwitchDown": {'up{job="pipeswitch"}': "0x90"},
    "PipeSwitchNotReady": {"pipeswitch_ready": "0x90"},
    "PipeSwitchRequestsFail": {'pipeswitch_requests_total{outcome="error"}': "0+20x90"},
    "PipeSwitchQueueFull": {
        "pipeswitch_queue_full_total": "0+1x90",
        'pipeswitch_requests_total{outcome="queue_full"}': "0+900x90",
    },
    "PipeSwitchWorkersDie": {"pipeswitch_worker_restarts_total": "0+1x90"},
    "PipeSwitchHostStoreFull": {'pipeswitch_memory_free_bytes{tier="host"}': "20x90"},
    "PipeSwitchJobNotPersisted": {
        'pipeswitch_job_persisted_step{state="running",exported_job="j"}': "7x90"
    },
}


@pytest.fixture(scope="module")
def promtool() -> str:
    path_of_tool = shutil.which("promtool")
    if path_of_tool is None:
        assert not os.environ.get("TESTS_NEED_PROMTOOL"), "this must run here"
        pytest.skip("no promtool here: it is in Debian's package prometheus")
    return path_of_tool


def checked(promtool: str, *words: str) -> str:
    done = subprocess.run([promtool, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_alert_rules_are_sound_and_each_has_a_test(promtool: str) -> None:
    checked(promtool, "check", "rules", str(RULES))
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(FAULTS)


OTHERS = (
    (None, {}),
    ("PipeSwitchQueueFull", {"pipeswitch_gateway_queue_full_total": "0+1x90"}),
    (  # also while most requests are refused
        "PipeSwitchRequestsFail",
        FAULTS["PipeSwitchRequestsFail"]
        | {'pipeswitch_requests_total{outcome="queue_full"}': "0+900x90"},
    ),
)


@pytest.mark.parametrize(("fault", "changes"), [*FAULTS.items(), *OTHERS])
def test_each_alert_fires_at_its_fault_and_no_other_does(
    promtool: str, tmp_path: Path, fault: str | None, changes: dict[str, str]
) -> None:
    series = WELL | changes
    alerts = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": key, "values": text} for key, text in series.items()],
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "85m",
                        "exp_samples": [
                            {"labels": f'{{alertname="{fault}"}}', "value": 1}
                            for _ in range(bool(fault))
                        ],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(alerts))
    checked(promtool, "test", "rules", str(path))
