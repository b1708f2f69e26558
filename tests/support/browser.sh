#!/bin/sh
# Installs Chromium for the tests of pages where root may; where it cannot, says so and goes on.
for name in google-chrome chromium chromium-browser; do
    command -v "$name" >/dev/null && exit 0
done
command=""
if command -v apt-get >/dev/null; then
    command="apt-get install --yes --no-install-recommends chromium"
elif command -v dnf >/dev/null; then
    command="dnf install --assumeyes chromium"
elif command -v apk >/dev/null; then
    command="apk add chromium"
fi
if [ -n "$command" ] && [ "$(id -u)" = 0 ]; then
    echo "Installing a browser for the tests of pages: $command"
    DEBIAN_FRONTEND=noninteractive timeout 300 $command >/dev/null 2>&1 && exit 0
fi
echo "******** No browser: the tests that open pages will not run. ${command:+As root: }${command:-Install chromium.}"
