#!/bin/sh
# Measures one GPU, at most 4 minutes, and writes benchmarks/device/RESULTS.md (see run.py). PYTHON chooses the
# interpreter. --dry runs everything small on the CPU under Triton's interpreter and writes nothing.
set -eu
cd "$(dirname "$0")/../.."
case " $* " in
*" --dry "*) export TRITON_INTERPRET=1 ;;
esac
exec timeout -k 5 240 "${PYTHON:-python3}" -m benchmarks.device.run "$@"
