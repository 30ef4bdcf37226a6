#!/bin/sh
# The environment of `make test-clients`: clients and agents that speak to the gateway. Their own
# folder, because their dependencies are many and none of them is needed to use the package.
set -e
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-python3.11}
[ -d .venv-clients ] || "$PYTHON" -m venv .venv-clients
PIP=".venv-clients/bin/python -m pip install --disable-pip-version-check --quiet"
$PIP -e '.[serve,mcp]' 'pytest>=8.4,<10' 'pytest-asyncio>=1,<2' 'pytest-timeout>=2.3,<3' \
  'hypothesis>=6.130,<7'
$PIP 'anthropic>=2,<3' 'langchain-openai>=1.7,<2' 'langgraph>=1.2,<2' 'openai-agents>=0.24,<1' 'dspy>=3.4,<4' 'smolagents[openai]>=1.26,<2' \
  'pydantic-ai-slim[openai]>=2.62,<3' 'inspect-ai>=0.3.285,<0.4'
if command -v npm >/dev/null; then
  (cd tests/serve/clients/node && npm install --no-audit --no-fund --silent)
fi
# `verifiers` wants an older openai client than the others: an environment of its own. From 0.4 on
# it starts each rollout's program with uv, which asks the network.
[ -d .venv-verifiers ] || "$PYTHON" -m venv .venv-verifiers
.venv-verifiers/bin/python -m pip install --disable-pip-version-check --quiet 'verifiers>=0.3,<0.4'
