"""benchmarks/gpu/report.py: a report has what developers need, and no secrets."""

import json
import socket
import stat

from benchmarks.gpu.report import redact, report, write_report
from megagrpo.cluster.doctor.machine import Finding, Machine

SECRETS = dict(
    HF_TOKEN="hf_abcdefghijklmnop", WANDB_API_KEY="0123456789abcdef0123", MY_PASSWORD="correct horse"
) | dict(HOME="/data/people/zoe", USER="zoe.miller")


def test_secrets_names_and_addresses_are_removed():
    text = (
        "hf_qrstuvwxyz123 0123456789abcdef0123 'correct horse' /data/people/zoe/runs /home/other/x "
        "https://me:pw@host/x zoe.miller Authorization: Bearer abcdefgh.ijk api_key=xyz token: 'abc def' a.b@c.org "
        "GPU-0a1b2c3d-1111-2222-3333-444455556660 10.1.2.3:80 tcp://8.8.8.8:1 <serial>1654</serial> "
        f"{socket.gethostname()}"
    )
    clean = redact(text, SECRETS)
    for secret in "qrst 0123456789 horse people other me:pw miller ijk xyz abc c.org 0a1b 10.1 8.8 1654".split():
        assert secret not in clean, (secret, clean)
    name = socket.gethostname()
    assert len(name) < 3 or name == "localhost" or name not in clean


def test_versions_and_ordinary_text_stay():
    text = "driver 580.95.05, nvidia-cublas 13.1.1.3, torch 2.13.0+cu130, 127.0.0.1:29500, /dev/shm, tokens 42, NV18"
    assert redact(text, SECRETS) == text


def test_a_report_is_one_file_for_its_owner_with_findings_variables_and_outputs(tmp_path):
    machine = Machine(environment=SECRETS | {"NCCL_DEBUG": "INFO", "MEGAGRPO_TOKEN": "abcdef123", "LANG": "C"})
    machine.outputs["nvidia-smi -q -x"] = "<serial>1654</serial> MEGAGRPO abcdef123"
    file = tmp_path / "deep" / "report.json"
    write_report(
        file,
        report(machine, [Finding("disk", "zoe.miller has 1 GiB", "warn", "free some")], parts={"a": {"exit_code": 3}}),
        machine.environment,
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content, text = json.loads(file.read_text()), file.read_text()
    assert content["variables"] == {"MEGAGRPO_TOKEN": "<secret>", "NCCL_DEBUG": "INFO"} and content["parts"] == {
        "a": {"exit_code": 3}
    }
    assert content["findings"][0]["result"] == "<user> has 1 GiB" and content["packages"]["torch"]
    assert not any(secret in text for secret in ("abcdef123", "1654", *SECRETS.values()))
