"""Defects of what containers and pods are told."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

DOCKER = ("tests/docker/test_docker.py",)
CHART = ("tests/deploy/test_chart.py",)

DEPLOYMENT_MUTANTS = (
    *mutants_of(
        "docker/Dockerfile",
        DOCKER,
        ("the health check asks a proxy", " --noproxy '*'", ""),
        ("the health check asks the server that was killed", "ls -td", "ls -trd"),
        ("the health check wants a certificate for the loopback", " --insecure", ""),
        ("whatever answers is healthy", "--fail --silent", "--silent"),
        ("the wheel has no kernels", "COPY kernels kernels\n", ""),
    ),
    *mutants_of(
        "docker/compose.yaml",
        DOCKER,
        ("services of Compose keep their capabilities", "  cap_drop: [ALL]\n", ""),
        ("Triton's environments cannot run in Compose", "mode=1777,exec", "mode=1777"),
    ),
    *mutants_of(
        "docker/prometheus/alerts.yml",
        DOCKER,
        ("low acceptance is high acceptance", " < 1.5", " > 1.5"),
    ),
    *mutants_of(
        "deploy/helm/dflash-triton/templates/deployment.yaml",
        CHART,
        ("a pod has as long as its requests", "{{ add $v.exitTimeout 15 }}", "{{ $v.exitTimeout }}"),
        (
            "an engine that restarts has its pod killed",
            'livenessProbe:\n            httpGet: {{ include "dflash.live" . }}',
            'livenessProbe:\n            httpGet: {{ include "dflash.ready" . }}',
        ),
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
