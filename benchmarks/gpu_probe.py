"""Settle what only a GPU can tell: the raw mechanisms, without any of PipeSwitch's own code.

    python benchmarks/gpu_probe.py [--out results.json] [--budget 570] [--rest] [probe ...]

``--rest`` leaves out what the other stages of ``gpu.py`` measure already.

Every probe runs in its own process with its own time limit, so a hang or a crash costs only that probe.
Needs torch >= 2.11 with CUDA, torchvision, cuda-bindings and nvidia-ml-py. It changes no GPU setting.
Not yet run on a GPU: read a FAILED line first as a fault of this script. Where there is no GPU it
says so and ends with status 3.
"""

import ctypes
import json
import mmap
import multiprocessing as mp
import os
import socket
import statistics as st
import subprocess
import sys
import time

MB, GB = 1 << 20, 1 << 30
LIMITS = {
    "env": 30,
    "arena": 75,
    "sync": 110,
    "pinned": 90,
    "pool": 90,
    "graph": 110,
    "train": 80,
    "slicing": 60,
    "ctx": 60,
    "vmm": 45,
}
BUDGET_S = 570
now = time.perf_counter


def put(**kv):
    print("RESULT " + json.dumps(kv, default=str), flush=True)


def attempt(name, fn):
    try:
        v = fn()
        put(**{name: "ok" if v is None else v})
        return v
    except Exception as e:  # a probe reports and goes on
        put(**{name: f"FAILED {type(e).__name__}: {str(e)[:160]}"})


def cu():
    from cuda.bindings import driver, runtime

    return runtime, driver


def ck(r):
    if int(r[0]) != 0:
        raise RuntimeError(str(r[0]))
    return r[1] if len(r) == 2 else (r[1:] or None)


def handle_bytes(
    h,
):  # .reserved exists in cuda-bindings 13.0 and not in 13.5; getPtr() exists in both
    return ctypes.string_at(int(h.getPtr()), 64)


def handle_from(cls, data):
    h = cls()
    ctypes.memmove(int(h.getPtr()), data, 64)
    return h


class Raw:  # __cuda_array_interface__ over a raw pointer; owner keeps the mapping alive
    def __init__(self, ptr, n):
        self.__cuda_array_interface__ = {
            "shape": (n,),
            "typestr": "|u1",
            "data": (ptr, False),
            "version": 3,
            "strides": None,
        }


def wrap(ptr, n):
    import torch

    return torch.as_tensor(Raw(ptr, n), device="cuda")


def used():
    import pynvml as nv

    nv.nvmlInit()
    return nv.nvmlDeviceGetMemoryInfo(nv.nvmlDeviceGetHandleByIndex(0)).used / MB


def med(xs):
    return round(st.median(xs), 2)


# ---------------------------------------------------------------- probes
def env():
    import torch

    _rt, drv = cu()
    import cuda.bindings

    put(
        torch=torch.__version__,
        bindings=cuda.bindings.__version__,
        gpu=torch.cuda.get_device_name(0),
    )
    ck(drv.cuInit(0))
    A = drv.CUdevice_attribute
    for n in (
        "ASYNC_ENGINE_COUNT",
        "IPC_EVENT_SUPPORTED",
        "CAN_USE_64_BIT_STREAM_MEM_OPS",
        "HOST_REGISTER_SUPPORTED",
        "READ_ONLY_HOST_REGISTER_SUPPORTED",
        "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        "COMPUTE_PREEMPTION_SUPPORTED",
        "PAGEABLE_MEMORY_ACCESS",
        "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    ):
        a = getattr(A, "CU_DEVICE_ATTRIBUTE_" + n, None)
        if a is not None:
            attempt(n, lambda: int(ck(drv.cuDeviceGetAttribute(a, 0))))
    import resource
    import shutil

    put(
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        dev_shm_mb=shutil.disk_usage("/dev/shm").total // MB,
        mem_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB),
        cores=os.cpu_count(),
        mps=bool(shutil.which("nvidia-cuda-mps-control")),
    )

    def link():
        import pynvml as nv

        nv.nvmlInit()
        d = nv.nvmlDeviceGetHandleByIndex(0)
        return {
            "driver": nv.nvmlSystemGetDriverVersion(),
            "pcie_gen": nv.nvmlDeviceGetCurrPcieLinkGeneration(d),
            "width": nv.nvmlDeviceGetCurrPcieLinkWidth(d),
        }

    attempt("link", link)
    for p in ("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "/proc/sys/vm/nr_hugepages"):
        attempt(p.split("/")[-1], lambda: open(p).read().strip())


def _ctx_child(kind, c):
    t = now()
    if kind == "bare":
        rt, _ = cu()
        ck(rt.cudaFree(0))
    else:
        import torch

        c.send(("import_s", round(now() - t, 2)))
        t = now()
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        if kind == "warm":
            torch.nn.Conv2d(8, 8, 3).cuda()(torch.ones(1, 8, 32, 32, device="cuda"))
            (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    c.send(("init_s", round(now() - t, 2)))
    c.recv()


def ctx():
    for kind in ("bare", "torch", "warm"):
        u0 = used()
        a, b = mp.Pipe()
        p = mp.Process(target=_ctx_child, args=(kind, b), daemon=True)
        p.start()
        out = {}
        while "init_s" not in out:
            k, v = a.recv()
            out[k] = v
        put(**{f"context_{kind}": dict(out, mib=round(used() - u0))})
        a.send(0)
        p.join()


def _arena_child(hb, n, c):
    import torch

    rt, _ = cu()
    torch.ones(1, device="cuda")
    t = now()
    ptr = ck(rt.cudaIpcOpenMemHandle(handle_from(rt.cudaIpcMemHandle_t, hb), 1))
    c.send(("open_ms", round((now() - t) * 1e3, 2)))
    t = now()
    ar = wrap(ptr, n)
    c.send(("as_tensor_us", round((now() - t) * 1e6)))
    stg = ar.untyped_storage()
    ct = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata
    t = now()
    vs = [
        ct(
            {
                "size": (64, 64),
                "stride": (64, 1),
                "dtype": torch.float32,
                "storage_offset": i * 4096,
            },
            stg,
        )
        for i in range(932)
    ]
    c.send(("fast_views_us_each", round((now() - t) / 932 * 1e6, 2)))
    t = now()
    ws = [torch.empty(0, device="cuda").set_(stg, i * 4096, (64, 64), (64, 1)) for i in range(932)]
    c.send(("set_views_us_each", round((now() - t) / 932 * 1e6, 2)))
    ok = vs[3].data_ptr() == ws[3].data_ptr()
    for d in (torch.bfloat16, torch.float8_e4m3fn):
        v = ct({"size": (16,), "stride": (1,), "dtype": d, "storage_offset": 0}, stg)
        v.copy_(torch.ones(16, device="cuda").to(d))
        ok &= bool((v.float() == 1).all())
    vs[0].fill_(7.0)
    torch.cuda.synchronize()
    c.send(("dtypes_ok", ok))
    c.recv()


def _fault_child():  # an illegal write: does it stay in this process?
    import torch

    torch.ones(1, device="cuda")
    stg = torch._C._construct_storage_from_data_pointer(
        0x7F0000000000, torch.device("cuda", 0), 4096
    )
    t = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        {"size": (64,), "stride": (1,), "dtype": torch.float32, "storage_offset": 0}, stg
    )
    t.fill_(1.0)
    torch.cuda.synchronize()


def arena():
    rt, _ = cu()
    free, _total = ck(rt.cudaMemGetInfo())
    n = int(free * 0.8) // (2 * MB) * (2 * MB)
    t = now()
    ptr = ck(rt.cudaMalloc(n))
    put(malloc_gib=round(n / GB), malloc_ms=round((now() - t) * 1e3, 1))
    hb = handle_bytes(ck(rt.cudaIpcGetMemHandle(ptr)))
    a, b = mp.Pipe()
    p = mp.Process(target=_arena_child, args=(hb, n, b), daemon=True)
    p.start()
    while True:
        k, v = a.recv()
        put(**{k: v})
        if k == "dtypes_ok":
            break
    h = (ctypes.c_float * 4)()
    ck(rt.cudaMemcpy(ctypes.addressof(h), ptr, 16, rt.cudaMemcpyKind.cudaMemcpyDeviceToHost))
    put(child_write_seen=h[0] == 7.0)
    p.kill()
    p.join()
    attempt("arena_usable_after_child_killed", lambda: ck(rt.cudaMemset(ptr, 0, 4096)))
    q = mp.Process(target=_fault_child, daemon=True)
    q.start()
    q.join(30)
    put(fault_child_exit=q.exitcode)
    attempt(
        "arena_usable_after_child_faulted",
        lambda: ck(rt.cudaMemset(ptr, 0, 4096)) or ck(rt.cudaDeviceSynchronize()),
    )
    t = now()
    ck(rt.cudaFree(ptr))
    put(free_ms=round((now() - t) * 1e3, 1))


def _memfd(n, huge=False):
    fd = os.memfd_create("probe")
    os.ftruncate(fd, n)
    m = mmap.mmap(fd, n)
    if huge:
        m.madvise(mmap.MADV_HUGEPAGE)
    return m, ctypes.addressof(ctypes.c_char.from_buffer(m))


def _h2d(rt, dst, src, n, chunk, s, kind):
    best = 1e9
    for _ in range(4):
        ck(rt.cudaStreamSynchronize(s))
        t = now()
        for o in range(0, n, chunk):
            ck(rt.cudaMemcpyAsync(dst + o, src + o, min(chunk, n - o), kind, s))
        q = now() - t
        ck(rt.cudaStreamSynchronize(s))
        best = min(best, now() - t)
    return round(n / best / 1e9, 1), round(q / max(1, n // chunk) * 1e6, 2)


def pinned():
    rt, _ = cu()
    ck(rt.cudaFree(0))
    K = rt.cudaMemcpyKind
    n = 4 * GB
    d = ck(rt.cudaMalloc(n))
    s, s2 = (ck(rt.cudaStreamCreateWithFlags(1)) for _ in range(2))
    for huge in (False, True):
        m, p = _memfd(n, huge)
        t = now()
        ctypes.memset(p, 1, n)
        touch = now() - t
        t = now()
        attempt(f"register_4GiB_hugepages_{huge}", lambda: ck(rt.cudaHostRegister(p, n, 0)))
        put(
            **{
                f"memfd_huge_{huge}": {
                    "touch_s": round(touch, 2),
                    "register_s": round(now() - t, 2),
                }
            }
        )
        if not huge:  # never let a mapping go while it is registered
            ck(rt.cudaHostUnregister(p))
            del m
    for c in (64 << 10, 256 << 10, MB, 4 * MB, 16 * MB, 256 * MB):
        g, us = _h2d(rt, d, p, min(n, 1000 * c), c, s, K.cudaMemcpyHostToDevice)
        put(**{f"h2d_chunk_{c >> 10}KiB": {"gb_s": g, "enqueue_us": us}})

    def duplex():
        t = now()
        ck(rt.cudaMemcpyAsync(d, p, GB, K.cudaMemcpyHostToDevice, s))
        ck(rt.cudaMemcpyAsync(p + 2 * GB, d + 2 * GB, GB, K.cudaMemcpyDeviceToHost, s2))
        ck(rt.cudaStreamSynchronize(s))
        ck(rt.cudaStreamSynchronize(s2))
        return round(2 * GB / (now() - t) / 1e9, 1)

    attempt("duplex_gb_s", duplex)
    t = now()
    h = ck(rt.cudaHostAlloc(2 * GB, 0))
    put(hostalloc_2GiB_s=round(now() - t, 2))
    ck(rt.cudaFreeHost(h))
    _m2, p2 = _memfd(512 * MB)
    ctypes.memset(p2, 1, 512 * MB)
    for o in (0, 256 * MB):
        ck(rt.cudaHostRegister(p2 + o, 256 * MB, 0))
    attempt(
        "copy_across_two_registrations",
        lambda: (
            ck(rt.cudaMemcpyAsync(d, p2 + 255 * MB, 2 * MB, K.cudaMemcpyHostToDevice, s))
            or ck(rt.cudaStreamSynchronize(s))
        ),
    )


def _sync_child(hb, ehb, c):
    import torch

    rt, drv = cu()
    torch.ones(1, device="cuda")
    ptr = ck(rt.cudaIpcOpenMemHandle(handle_from(rt.cudaIpcMemHandle_t, hb), 1))
    ev = ck(rt.cudaIpcOpenEventHandle(handle_from(rt.cudaIpcEventHandle_t, ehb)))
    data = wrap(ptr + 4096, 8 * MB).view(torch.int32)
    s, busy = torch.cuda.Stream(), torch.cuda.Stream()
    big = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(
        s
    ):  # load every kernel now: lazy loading may need the context idle, and then a queued wait would block the CPU
        int(data[:256].sum()), int(data.sum()), big @ big
    torch.cuda.synchronize()
    c.send("ready")
    g = None
    while True:
        m = c.recv()
        if m[0] == "stop":
            return
        if m[0] == "busy":
            with torch.cuda.stream(busy):
                for _ in range(m[1]):
                    big @ big
            c.send("busy")
            continue
        if m[0] == "idle":
            busy.synchronize()
            c.send("idle")
            continue
        if m[0] == "capture":
            try:
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g, stream=s, capture_error_mode="thread_local"):
                    if m[1] == "memop":
                        ck(drv.cuStreamWaitValue32(s.cuda_stream, ptr, m[2], 0))
                    else:
                        ck(rt.cudaStreamWaitEvent(s.cuda_stream, ev, 1))
                    out = data.sum()
                c.send("captured")
            except Exception as e:
                g = None
                c.send(f"FAILED {type(e).__name__}: {str(e)[:120]}")
            continue
        how, ep = m
        with torch.cuda.stream(s):
            if how in ("write", "copy4"):
                ck(drv.cuStreamWaitValue32(s.cuda_stream, ptr, ep, 0))
            elif how == "event":
                ck(rt.cudaStreamWaitEvent(s.cuda_stream, ev, 0))
            if how == "graph":
                g.replay()
            else:
                out = data[:256].sum()
        pending = not s.query()
        if how in ("write", "copy4", "graph"):
            c.send("queued")
        s.synchronize()
        c.send((time.monotonic_ns(), int(out) if how != "graph" else None, pending))


def sync():
    rt, drv = cu()
    ck(rt.cudaFree(0))
    K = rt.cudaMemcpyKind
    n = 512 * MB
    ptr = ck(rt.cudaMalloc(n))
    ck(rt.cudaMemset(ptr, 0, n))
    ev = ck(rt.cudaEventCreateWithFlags(6))  # disable timing | interprocess
    s = ck(rt.cudaStreamCreateWithFlags(1))
    m, p = _memfd(300 * MB)
    ctypes.memset(p, 0, 300 * MB)
    ck(rt.cudaHostRegister(p, 300 * MB, 0))
    words = (ctypes.c_uint32 * (75 * MB)).from_buffer(m)
    a, b = mp.Pipe()
    pr = mp.Process(
        target=_sync_child,
        args=(
            handle_bytes(ck(rt.cudaIpcGetMemHandle(ptr))),
            handle_bytes(ck(rt.cudaIpcGetEventHandle(ev))),
            b,
        ),
        daemon=True,
    )
    pr.start()
    a.recv()
    ep = 0

    def flag(how, e):
        if how == "write":
            ck(drv.cuStreamWriteValue32(int(s), ptr, e, 0))
        else:  # 4-byte copy on the same stream: stays on the copy engine
            words[70 * MB + e % MB] = e
            ck(rt.cudaMemcpyAsync(ptr, p + 4 * (70 * MB + e % MB), 4, K.cudaMemcpyHostToDevice, s))

    def one(how):
        nonlocal ep
        ep += 1
        for i in range(256):
            words[i] = ep
        if how in ("write", "copy4"):
            a.send((how, ep))
            a.recv()
            time.sleep(0.002)
        t = time.monotonic_ns()
        ck(rt.cudaMemcpyAsync(ptr + 4096, p, MB, K.cudaMemcpyHostToDevice, s))
        if how in ("write", "copy4"):
            flag(how, ep)
        elif how == "event":
            ck(rt.cudaEventRecord(ev, s))
            a.send((how, ep))
        else:
            ck(rt.cudaStreamSynchronize(s))
            a.send((how, ep))
        t1, v, pend = a.recv()
        ck(rt.cudaStreamSynchronize(s))
        return (t1 - t) / 1e3, v == 256 * ep, pend

    for how in ("write", "copy4", "event", "cpu"):

        def run():
            r = [one(how) for _ in range(150)]
            return {
                "us": med([x[0] for x in r]),
                "worst": round(max(x[0] for x in r)),
                "all_correct": all(x[1] for x in r),
                "gpu_waited": r[-1][2],
            }

        attempt(f"group_ready_{how}", run)
    for how in ("write", "copy4"):
        for load in ("idle", "busy"):

            def run():
                nonlocal ep
                if load == "busy":
                    a.send(("busy", 300))
                    a.recv()
                t = now()
                for g in range(32):
                    ep += 1
                    ck(
                        rt.cudaMemcpyAsync(
                            ptr + MB + g * 8 * MB, p, 8 * MB, K.cudaMemcpyHostToDevice, s
                        )
                    )
                    flag(how, ep)
                q = now() - t
                ck(rt.cudaStreamSynchronize(s))
                out = {"total_ms": round((now() - t) * 1e3, 2), "enqueue_ms": round(q * 1e3, 2)}
                a.send(("idle",))
                a.recv()
                return out

            attempt(f"copy_32x8MiB_flag_{how}_worker_{load}", run)
    for kind in ("memop", "event"):
        a.send(("capture", kind, ep + 1))
        r = a.recv()
        put(**{f"capture_{kind}_wait": r})
        if r == "captured" and kind == "memop":
            a.send(("graph", ep + 1))
            a.recv()
            ep += 1
            flag("write", ep)
            put(graph_replay_waited=a.recv()[2])
    a.send(("stop",))
    pr.join()


def pool():
    import torch
    import torchvision

    rt, _ = cu()
    torch.ones(1, device="cuda")
    SL = 8 * GB
    base = ck(rt.cudaMalloc(SL))
    cur, log, freed = [0], [], []

    def alloc(n, dev, stream):
        n = (n + 2 * MB - 1) // (2 * MB) * (2 * MB)
        log.append(n)
        if cur[0] + n > SL:
            return 0
        cur[0] += n
        return base + cur[0] - n

    a = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(alloc)
    f = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
        lambda *x: freed.append(x[1])
    )
    box = [
        torch.cuda.MemPool(
            torch._C._cuda_customAllocator(*(ctypes.cast(x, ctypes.c_void_p).value for x in (a, f)))
        )
    ]
    s = torch.cuda.Stream()

    def inside(t):
        return base <= t.data_ptr() < base + SL

    net = torchvision.models.resnet152().cuda().eval()
    x = torch.randn(8, 3, 224, 224, device="cuda")
    with torch.cuda.stream(s), torch.inference_mode():
        net(x)
    torch.cuda.synchronize()
    t = now()
    with torch.cuda.stream(s), torch.cuda.use_mem_pool(box[0]):
        hold = [torch.empty(MB, dtype=torch.uint8, device="cuda") for _ in range(64)]
        hold.append(torch.empty(SL - 64 * MB, dtype=torch.uint8, device="cuda"))
        del hold
    put(reserve_us=round((now() - t) * 1e6), reserve_callbacks=len(log))
    k, r0 = len(log), torch.cuda.memory_reserved()
    with torch.cuda.stream(s), torch.cuda.use_mem_pool(box[0]), torch.inference_mode():
        y = net(x)
    torch.cuda.synchronize()
    put(
        output_in_slice=inside(y),
        callbacks_during_forward=len(log) - k,
        reserved_growth_mib=(torch.cuda.memory_reserved() - r0) // MB,
    )
    del y
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MB) / total)

    def over():
        k = len(log)
        try:
            with torch.cuda.stream(s), torch.cuda.use_mem_pool(box[0]):
                torch.empty(2 * SL, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return f"OOM raised, callbacks {len(log) - k}"
        return "NOT refused"

    attempt("cap_by_fraction", over)
    torch.cuda.set_per_process_memory_fraction(1.0)

    def capture():
        g = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(g, pool=box[0].id, stream=s):
            y = net(x)
        g.replay()
        torch.cuda.synchronize()
        return f"output in slice: {inside(y)}"

    attempt("graph_captured_into_slice", capture)
    for mt in (True, False):
        net.train()
        with (
            torch.autograd.set_multithreading_enabled(mt),
            torch.cuda.stream(s),
            torch.cuda.use_mem_pool(box[0]),
        ):
            net(x).sum().backward()
        torch.cuda.synchronize()
        put(
            **{
                f"grads_in_slice_multithreading_{mt}": f"{sum(inside(p.grad) for p in net.parameters())}/467"
            }
        )
        net.zero_grad(set_to_none=True)

    def rec():
        o = torch.cuda.Stream()
        k = len(log)
        with torch.cuda.stream(s), torch.cuda.use_mem_pool(box[0]):
            for _ in range(200):
                q = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
                q.record_stream(o)
                del q
                s.synchronize()
        return f"{len(log) - k} new callbacks in 200 x 64 MiB"

    attempt("record_stream_inside_pool", rec)
    live = sum(
        b["size"]
        for g in box[0].snapshot()
        for b in g["blocks"]
        if b["state"] == "active_allocated"
    )
    put(live_bytes_after=live)
    t = now()
    box.clear()
    put(drop_pool_us=round((now() - t) * 1e6), free_callbacks=len(freed))


def _models():
    import torch
    import torchvision

    enc = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu"),
        12,
        enable_nested_tensor=False,
    )
    yield (
        "resnet152",
        torchvision.models.resnet152().cuda().eval(),
        torch.randn(8, 3, 224, 224, device="cuda"),
    )
    yield "bert_base_like", enc.cuda().eval(), torch.randn(8, 128, 768, device="cuda")


def graph():
    import torch
    import torch.backends.mha

    torch.backends.mha.set_fastpath_enabled(False)
    s = torch.cuda.Stream()
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        for name, net, x in _models():
            with torch.inference_mode(), torch.cuda.stream(s):
                for _ in range(5):
                    net(x)
                q, tot = [], []
                for _ in range(15):
                    torch.cuda.synchronize()
                    t = now()
                    y = net(x)
                    q.append((now() - t) * 1e3)
                    s.synchronize()
                    tot.append((now() - t) * 1e3)
                free0 = torch.cuda.mem_get_info()[0]
                t = now()
                g = torch.cuda.CUDAGraph()
                with torch.cuda.graph(g, stream=s):
                    yg = net(x)
                cap = now() - t
                gq, gt = [], []
                for _ in range(15):
                    torch.cuda.synchronize()
                    t = now()
                    g.replay()
                    gq.append((now() - t) * 1e3)
                    s.synchronize()
                    gt.append((now() - t) * 1e3)
                put(
                    **{
                        f"{name}_tf32_{tf32}": {
                            "eager_cpu_ms": med(q),
                            "eager_ms": med(tot),
                            "graph_launch_ms": med(gq),
                            "graph_ms": med(gt),
                            "capture_s": round(cap, 2),
                            "graph_mib": (free0 - torch.cuda.mem_get_info()[0]) // MB,
                            "same": bool(torch.allclose(y, yg, rtol=1e-3, atol=1e-3)),
                        }
                    }
                )
    import torchvision

    net = torchvision.models.resnet152().cuda().eval()
    blocks = [b for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for b in layer]
    h, gs = torch.randn(8, 64, 56, 56, device="cuda"), []
    with torch.inference_mode(), torch.cuda.stream(s):
        z = h
        for b in blocks:
            z = b(z)
        torch.cuda.synchronize()
        free0, pl = torch.cuda.mem_get_info()[0], torch.cuda.graph_pool_handle()
        z, keep = h, []
        for b in blocks:
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, pool=pl, stream=s):
                z = b(z)
            gs.append(g)
            keep.append(z)
        q, tot = [], []
        for _ in range(15):
            torch.cuda.synchronize()
            t = now()
            for g in gs:
                g.replay()
            q.append((now() - t) * 1e3)
            s.synchronize()
            tot.append((now() - t) * 1e3)
    put(
        per_block_graphs={
            "n": len(gs),
            "launch_ms": med(q),
            "total_ms": med(tot),
            "mib": (free0 - torch.cuda.mem_get_info()[0]) // MB,
        }
    )


def train():
    import torch
    import torchvision

    net = torchvision.models.resnet152().cuda().train()
    opt = torch.optim.Adam(net.parameters(), foreach=True)
    for bs in (8, 32):
        x = torch.randn(bs, 3, 224, 224, device="cuda")

        def step():
            opt.zero_grad(set_to_none=True)
            net(x).square().mean().backward()
            t = now()
            opt.step()
            return now() - t

        for _ in range(3):
            step()
        r = []
        for _ in range(6):
            torch.cuda.synchronize()
            t = now()
            o = step()
            q = now() - t
            torch.cuda.synchronize()
            r.append((q * 1e3, (now() - t) * 1e3, o * 1e3))
        put(
            **{
                f"train_bs{bs}": {
                    "enqueue_ms": med([a[0] for a in r]),
                    "step_ms": med([a[1] for a in r]),
                    "opt_enqueue_ms": med([a[2] for a in r]),
                }
            }
        )
    src = [p.detach() for p in net.parameters()] + [
        v for d in opt.state.values() for v in d.values() if torch.is_tensor(v) and v.is_cuda
    ]
    dst = [torch.empty_like(v) for v in src]
    nb = sum(v.numel() * v.element_size() for v in src)
    for _ in range(3):
        torch.cuda.synchronize()
        t = now()
        torch._foreach_copy_(dst, src)
        q = now() - t
        torch.cuda.synchronize()
        w = now() - t
    put(
        shadow_copy={
            "mb": round(nb / 1e6),
            "enqueue_ms": round(q * 1e3, 2),
            "total_ms": round(w * 1e3, 2),
        }
    )

    class Stop(BaseException):
        pass

    box = [0.0]

    def hook(p):
        if box[0]:
            raise Stop

    for p in list(net.parameters())[::20]:
        p.register_post_accumulate_grad_hook(hook)
    lat = []
    import threading

    for d in (0.02, 0.03, 0.04, 0.05, 0.06):
        box[0] = 0.0
        tm = threading.Timer(d, lambda: box.__setitem__(0, now()))
        tm.start()
        try:
            for _ in range(10):
                step()
        except Stop:
            caught = now()
            torch.cuda.synchronize()
            lat.append(((caught - box[0]) * 1e3, (now() - box[0]) * 1e3))
        tm.join()
    put(
        preempt_backward_hooks=[
            {"raised_ms": round(a, 1), "drained_ms": round(b, 1)} for a, b in lat
        ]
    )


def _slice_child(kind, c):
    import torch

    _rt, drv = cu()
    big = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    s = torch.cuda.Stream()
    torch.cuda.synchronize()
    if kind == "blocked":  # many kernels queued behind a wait that is not satisfied yet
        ck(drv.cuStreamWaitValue32(s.cuda_stream, flag.data_ptr(), 1, 0))
        with torch.cuda.stream(s):
            for _ in range(200):
                big @ big
    c.send("on")
    if kind == "busy":
        while not c.poll():
            for _ in range(20):
                big @ big
            torch.cuda.synchronize()
    c.recv()
    if kind == "blocked":
        flag.fill_(1)
        s.synchronize()


def slicing():
    import torch

    x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    tiny = torch.ones(1, device="cuda")

    def measure():
        lat = []
        for _ in range(200):
            t = now()
            tiny.add_(1)
            torch.cuda.synchronize()
            lat.append((now() - t) * 1e6)
        t = now()
        for _ in range(300):
            x @ x
        torch.cuda.synchronize()
        lat.sort()
        return {
            "tiny_us_p50": med(lat),
            "tiny_us_p99": round(lat[197]),
            "work_ms": round((now() - t) * 1e3, 1),
        }

    measure()
    put(alone=measure())
    for kind in ("idle", "blocked", "busy"):
        a, b = mp.Pipe()
        p = mp.Process(target=_slice_child, args=(kind, b), daemon=True)
        p.start()
        a.recv()
        put(**{f"beside_{kind}_process": measure()})
        a.send(0)
        p.join(20)
        p.kill()


def _vmm_child(sock_fd, n):
    rt, drv = cu()
    ck(rt.cudaFree(0))
    sk = socket.socket(fileno=sock_fd)
    _, fds, _, _ = socket.recv_fds(sk, 16, 1)
    t0 = now()
    H = drv.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    h = ck(drv.cuMemImportFromShareableHandle(fds[0], H))
    t1 = now()
    va = ck(drv.cuMemAddressReserve(n, 0, 0, 0))
    t2 = now()
    acc = drv.CUmemAccessDesc()
    acc.location.type = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    acc.location.id = 0
    acc.flags = drv.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ts = []
    for _ in range(5):
        t = now()
        ck(drv.cuMemMap(va, n, 0, h, 0))
        ck(drv.cuMemSetAccess(va, n, [acc], 1))
        ts.append(now() - t)
        u = now()
        ck(drv.cuMemUnmap(va, n))
        un = now() - u
    put(
        vmm_import_ms=round((t1 - t0) * 1e3, 2),
        reserve_ms=round((t2 - t1) * 1e3, 2),
        map_ms=med([x * 1e3 for x in ts]),
        unmap_ms=round(un * 1e3, 2),
    )
    acc.flags = drv.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    ck(drv.cuMemMap(va, n, 0, h, 0))
    attempt("vmm_read_only_access", lambda: ck(drv.cuMemSetAccess(va, n, [acc], 1)))


def vmm():
    rt, drv = cu()
    ck(rt.cudaFree(0))
    H = drv.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pr = drv.CUmemAllocationProp()
    pr.type = drv.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    pr.location.type = drv.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pr.location.id = 0
    pr.requestedHandleTypes = H
    t = now()
    h = ck(drv.cuMemCreate(GB, pr, 0))
    fd = int(ck(drv.cuMemExportToShareableHandle(h, H, 0)))
    put(vmm_create_export_1GiB_ms=round((now() - t) * 1e3, 2))
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    p = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "--vmm-child", str(b.fileno()), str(GB)],
        pass_fds=[b.fileno()],
    )
    socket.send_fds(a, [b"arena"], [fd])
    p.wait(35)


def main():
    args = sys.argv[1:]
    if args[:1] == ["--vmm-child"]:
        return _vmm_child(int(args[1]), int(args[2]))
    if "--one" not in args:
        from gpu_common import require_gpu

        require_gpu()
    if args[:1] == ["--one"]:
        mp.set_start_method("spawn")
        return globals()[args[1]]()
    out = "gpu_probe.json"
    if "--out" in args:
        i = args.index("--out")
        out = args[i + 1]
        del args[i : i + 2]
    budget_s = BUDGET_S
    if "--budget" in args:
        i = args.index("--budget")
        budget_s = float(args[i + 1])
        del args[i : i + 2]
    if "--rest" in args:
        args = ["sync", "pinned", "slicing", "ctx", "arena", "graph", "pool", "train", "vmm"]
    t0, res = time.time(), {}
    for name in args or LIMITS:
        left = budget_s - (time.time() - t0)
        if left < 15:
            res[name] = {"skipped": "no time left"}
            continue
        t, r = time.time(), {}
        with subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--one", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as p:
            try:
                txt = p.communicate(timeout=min(LIMITS[name], left))[0]
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, 9)
                txt = p.communicate()[0] + "\nTIMED OUT"
        for line in txt.splitlines():
            if line.startswith("RESULT "):
                r.update(json.loads(line[7:]))
        if p.returncode:
            r["exit"] = p.returncode
            r["tail"] = txt[-600:]
        r["seconds"] = round(time.time() - t, 1)
        res[name] = r
        print(f"== {name}")
        for k, v in r.items():
            print(f"   {k}: {v}")
        print("RESULT " + json.dumps({name: r}, default=str), flush=True)
        with open(out, "w") as fh:
            json.dump(res, fh, indent=1)
    print(f"total {time.time() - t0:.0f} s, written to {out}")


if __name__ == "__main__":
    main()
