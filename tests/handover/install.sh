#!/bin/sh
# The environments of `make test-handover`: trainers whose own loaders read what is handed over. Each
# sees the development environment's packages behind its own, because their dependencies are many
# and partly contradict ours; only their loaders are used.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3.11}
beside() {
  name=$1
  shift
  [ -d ".venv-handover/$name" ] || "$PYTHON" -m venv ".venv-handover/$name"
  ".venv-handover/$name/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
  site=$(".venv-handover/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/zz_dev.pth"
}
beside verl --no-deps 'verl==0.9.1' 'skyrl-gym==0.4.0' 'tensordict>=0.10' 'omegaconf>=2.3,<3' \
  'antlr4-python3-runtime==4.9.3' 'codetiming>=1.4' 'hydra-core>=1.3,<2' 'pyvers' 'cachetools'
beside verifiers 'verifiers==0.4.0'
