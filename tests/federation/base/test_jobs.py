"""What the jobs of the queues hold, in Python and on the wire."""

from __future__ import annotations

from federation.base.queues.job_data import FederationDeliveryJob, HealthCheckJob


def test_job_data_takes_either_spelling_in_python_and_is_camel_case_on_the_wire() -> None:
    """Snake case and camel case make the same job; the payload stays out of its repr."""
    wire = {"deliveryJobId": "d", "targetUrl": "t", "serverUrl": "s", "payload": "p4yload"}
    job = FederationDeliveryJob.model_validate(wire)
    assert job == FederationDeliveryJob(delivery_job_id="d", target_url="t", server_url="s", payload="p4yload")
    assert job.to_wire() == wire
    assert "p4yload" not in repr(job)
    assert HealthCheckJob(server_url="s").to_wire() == {"serverUrl": "s"}
