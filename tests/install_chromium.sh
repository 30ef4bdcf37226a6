# Install Debian's chromium where apt and root are there; otherwise say why the browser tests skip.
if command -v chromium >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "browser: no chromium, and no root with apt-get to install it: browser tests will skip"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1; then
    echo "browser: chromium installed"
else
    echo "browser: apt-get could not install chromium: browser tests will skip"
fi
