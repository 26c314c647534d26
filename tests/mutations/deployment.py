"""Defects of what containers and pods are told."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

DOCKER = "tests/docker/test_docker.py"
HEALTH = (
    f"{DOCKER}::test_the_health_check_is_what_the_server_says",
    f"{DOCKER}::test_the_health_check_does_not_ask_for_whom_the_certificate_is",
)
COMPOSE = (
    f"{DOCKER}::test_compose_gives_its_services_no_privilege_and_no_file_to_change",
    f"{DOCKER}::test_a_server_in_compose_can_write_where_it_must_and_has_bounded_memory",
)
CHART = ("tests/deploy/test_chart.py",)

DEPLOYMENT_MUTANTS = (
    *mutants_of(
        "docker/Dockerfile",
        HEALTH,
        ("the health check asks a proxy", " --noproxy '*'", ""),
        ("the health check asks the server that was killed", "ls -td", "ls -trd"),
        ("the health check wants a certificate for the loopback", " --insecure", ""),
        ("whatever answers is healthy", "--fail --silent", "--silent"),
    ),
    *mutants_of(
        "docker/Dockerfile",
        (f"{DOCKER}::test_a_container_whose_command_takes_no_requests_is_healthy",),
        ("a container that trains is not healthy", " *'dflash-triton '[a-z]*) exit 0 ;;", ""),
        ("a container is healthy before it serves", "*'dflash-triton serve '*|", ""),
    ),
    *mutants_of(
        "cli/dflash_cli/commands/openai.py",
        (
            "tests/cli/test_server_options.py::test_openai_writes_down_what_says_whether_it_takes_requests_unless_serve_has_done_so",
        ),
        ("a health check asks the front end in place of what serve says", "arguments.heartbeat_fd is None and ", ""),
    ),
    *mutants_of(
        "docker/Dockerfile",
        (f"{DOCKER}::test_the_wheel_of_what_the_image_copies_has_all_files_and_the_command",),
        ("the wheel has no kernels", "COPY kernels kernels\n", ""),
    ),
    *mutants_of(
        "deploy/compose.yaml",
        COMPOSE,
        ("services of Compose keep their capabilities", "  cap_drop: [ALL]\n", ""),
        ("Triton's environments cannot run in Compose", "mode=1777,exec", "mode=1777"),
    ),
    *mutants_of(
        "deploy/prometheus/alerts.yml",
        (
            f"{DOCKER}::test_what_an_alert_compares_and_for_how_long_is_as_it_was_chosen",
            f"{DOCKER}::test_probes_that_fail_are_no_requests_that_do",
        ),
        ("low acceptance is high acceptance", " < 1.5", " > 1.5"),
        ("probes that get 503 are an alert", '/health.*|/ping"', '/health"'),
        ("pods that are gone raise nothing", 'absent(up{job="dflash"})', 'up{job="dflash"} == 0'),
    ),
    Mutant(
        "without keys a pod is open to everybody",
        "deploy/helm/dflash-triton/templates/networkpolicy.yaml",
        "{{- else if not $v.apiKeys.secretName }}",
        "{{- else if $v.apiKeys.secretName }}",
        CHART,
    ),
    *mutants_of(
        "deploy/helm/dflash-triton/templates/deployment.yaml",
        CHART,
        ("a pod has as long as its requests", "{{ add $v.exitTimeout 15 }}", "{{ $v.exitTimeout }}"),
        ("a first start has a sixth of its minutes", "{{ mul $v.startupMinutes 6 }}", "{{ $v.startupMinutes }}"),
        ("with keys nobody reads a pod's metrics", "            - --metrics-host=0.0.0.0\n", ""),
        (
            "an engine that restarts has its pod killed",
            'livenessProbe:\n            httpGet: {{ include "dflash.live" . }}',
            'livenessProbe:\n            httpGet: {{ include "dflash.ready" . }}',
        ),
        (
            "an upgrade has failed before its pods may have started",
            "progressDeadlineSeconds: {{ add (mul $v.startupMinutes 60) 600 }}",
            "progressDeadlineSeconds: 600",
        ),
        ("an upgrade needs a GPU more", "rollingUpdate: {maxSurge: 0, maxUnavailable: 1}", "rollingUpdate: {}"),
        ("engines of a pod have one port for KV", "{{ add $v.kvTransfer.port $engine }}", "{{ $v.kvTransfer.port }}"),
    ),
    *mutants_of(
        "deploy/helm/dflash-triton/templates/_helpers.tpl",
        CHART,
        (
            "a dead front end leaves its pod ready",
            "{path: /health/ready, port: openai,",
            "{path: /v2/health/ready, port: http,",
        ),
        ("probes speak HTTP to HTTPS", "HTTPS{{ else }}HTTP", "HTTP{{ else }}HTTP"),
    ),
    *mutants_of(
        "deploy/kserve/servingruntime.yaml",
        CHART,
        ("a pod of KServe has as long as its requests", "--exit-timeout=15", "--exit-timeout=30"),
        ("KServe's liveness is readiness", "path: /health/live", "path: /health/ready"),
    ),
    *mutants_of(
        "deploy/kserve/servingruntime-openai.yaml",
        CHART,
        ("KServe leads OpenAI's clients to Triton", "containerPort: 9000", "containerPort: 8000"),
        ("OpenAI's runtime opens Triton, which checks no keys", "--triton-host=127.0.0.1", "--triton-host=0.0.0.0"),
    ),
    *mutants_of(
        "dflash_backend/config.py",
        ("tests/engine/test_config.py",),
        ("a Service of Kubernetes stops the load", "\n        and not _is_service_link(name, value, environ)", ""),
        ("a port that has a Service's name is ignored", "return _SERVICE_URL.match(value) is not None", "return True"),
    ),
    *mutants_of(
        "dflash_backend/triton/service.py",
        ("tests/triton/test_service.py::test_a_question_whether_requests_are_taken_is_none_that_was_refused",),
        ("a probe is a request that was refused", ", counted=counted)", ")"),
    ),
    *mutants_of(
        "frontend/dflash_openai/middleware/browser_guard.py",
        ("tests/frontend/middleware/test_browser_guard.py",),
        ("a probe has to know the server's name", " and path not in HEALTH_PATHS", ""),
    ),
    *mutants_of(
        "cli/dflash_cli/launcher/frontend.py",
        (
            "tests/cli/test_frontend_process.py::test_who_has_no_certificate_asks_it_whether_requests_are_taken_where_it_lets_him",
        ),
        (
            "a health check without a certificate asks who wants one",
            "return None if self._tls is not None and self._tls.client_ca is not None else",
            "return",
        ),
    ),
)
