"""Compiles a program with NVRTC, which finds no header and no GPU: any message is an error."""

import ctypes
import glob
import sys

home, path, declared, architectures, *options = sys.argv[1:]
text = open(path, "rb").read()

found = sorted(glob.glob(f"{home}/lib*/libnvrtc.so.[0-9]*"))
if not found:
    sys.exit(f"there is no NVRTC in {home}")
# What NVRTC opens by name lies beside it, where no loader looks.
for builtins in glob.glob(f"{home}/lib*/libnvrtc-builtins.so.[0-9]*"):
    ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
nvrtc = ctypes.CDLL(found[0])
nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p


def call(name, *arguments):
    status = getattr(nvrtc, name)(*arguments)
    if status != 0:
        sys.exit(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()}")


def output(program, what):
    size = ctypes.c_size_t()
    call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    call(f"nvrtcGet{what}", program, buffer)
    return buffer.raw


major, minor = ctypes.c_int(), ctypes.c_int()
call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
for architecture in architectures.split():
    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    flags = [flag.encode() for flag in [*options, f"--gpu-architecture={architecture}"]]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = output(program, "ProgramLog").rstrip(b"\0").decode()
    if status != 0 or log.strip():
        sys.exit(f"NVRTC for {architecture}: {log}{nvrtc.nvrtcGetErrorString(status).decode()}")
    cubin, ptx = output(program, "CUBIN"), output(program, "PTX")
    entries = ptx.count(b".visible .entry ")
    if entries != int(declared):
        sys.exit(f"NVRTC for {architecture}: {entries} kernels, {declared} are declared")
    print(f"NVRTC {major.value}.{minor.value}, {architecture}: {entries} kernels, {len(cubin)} bytes")
    call("nvrtcDestroyProgram", ctypes.byref(program))
