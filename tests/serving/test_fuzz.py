"""The service under schemathesis: requests made from its own description, valid and not."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_breaks_the_service(classifier, mode):
    import hypothesis
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    from stfseb.serving.app import ServiceLimits, create_app

    app = create_app(classifier, ServiceLimits(rate=0, most_images=2), hosts=("*",))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    wanted = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    seen = {}

    def fuzz(operation):
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @hypothesis.given(case=strategy)
        @hypothesis.settings(
            max_examples=50, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None
        )
        def run(case):
            response = case.call()
            case.validate_response(response, checks=wanted)
            seen.setdefault(case.path, set()).add(response.status_code)

        run()

    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == "POSITIVE" or operation.path.startswith("/predict"):  # the others take nothing that could be wrong
            fuzz(operation)
    if mode == "POSITIVE":
        assert set(seen) == {"/", "/predict", "/predict/image", "/health", "/metrics"}
        assert seen["/predict"] == {200}
    else:
        assert set(seen) == {"/predict", "/predict/image"}
        assert 200 not in seen["/predict"]
