#!/bin/sh
# Install the rivals, one environment each, beside the repository's own: .venv-peers/NAME.
set -eu
cd "$(dirname "$0")/../../.."
python=${PYTHON:-python3.11}
install() {
  name=$1
  shift
  [ -x ".venv-peers/$name/bin/python" ] || "$python" -m venv ".venv-peers/$name"
  ".venv-peers/$name/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}
install gepa "gepa==0.1.4" "litellm>=1.83.14,<1.92" tqdm
install dspy "dspy==3.4.1" numpy
install ace "ace-playbook[openai]==0.3.0"
