#!/bin/sh
# Run a command as on a machine that has never run this project: an empty home and empty caches, in
# a temporary folder that goes afterwards.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir "$place/home" "$place/cache" "$place/models"
HOME=$place/home XDG_CACHE_HOME=$place/cache TFGRPO_CACHE=$place/models "$@"
