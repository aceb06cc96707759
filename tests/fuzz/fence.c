/* Preloaded by fence.py: torch's own allocations (it takes them by posix_memalign) end at an
   unmapped page and begin as a pattern; what lies around them on their pages is looked at when they
   are freed. Each has addresses of its own, so a late use of freed memory is a fault too. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define RANGE (1UL << 40)
#define LARGEST (64UL << 20)
#define AROUND 0x5c

static uint8_t *base;
static uint32_t *sizes; /* by the page an allocation begins on */
static uint64_t next_page;
static volatile int lock, pattern = -1;

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

void fence_pattern(int byte) {
    if (!base) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        sizes = mmap(0, RANGE / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE, flags, -1, 0);
        uint8_t *found = mmap(0, RANGE, PROT_NONE, flags, -1, 0);
        if (found == MAP_FAILED || sizes == MAP_FAILED) abort();
        base = found;
    }
    pattern = byte;
}

int posix_memalign(void **out, size_t align, size_t size) {
    if (pattern < 0 || size == 0 || size > LARGEST || align > PAGE) {
        *out = __libc_memalign(align, size);
        return *out ? 0 : ENOMEM;
    }
    size_t pages = (size + align + PAGE - 1) / PAGE;
    while (__sync_lock_test_and_set(&lock, 1)) {
    }
    if ((next_page + pages + 2) * PAGE > RANGE) abort();
    uint8_t *first = base + (next_page + 1) * PAGE, *end = first + pages * PAGE;
    next_page += pages + 1;
    __sync_lock_release(&lock);
    if (mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    uint8_t *start = (uint8_t *)((uintptr_t)(end - size) & ~(align - 1));
    memset(first, AROUND, pages * PAGE);
    memset(start, pattern, size);
    sizes[(start - base) / PAGE] = size;
    *out = start;
    return 0;
}

void free(void *address) {
    uint8_t *start = address;
    if (!base || start < base || start >= base + RANGE) {
        __libc_free(address);
        return;
    }
    size_t size = sizes[(start - base) / PAGE];
    uint8_t *first = (uint8_t *)((uintptr_t)start & ~(PAGE - 1));
    uint8_t *end = (uint8_t *)(((uintptr_t)start + size + PAGE - 1) & ~(PAGE - 1));
    for (uint8_t *at = first; at < start; at++)
        if (*at != AROUND) abort();
    for (uint8_t *at = start + size; at < end; at++)
        if (*at != AROUND) abort();
    madvise(first, end - first, MADV_DONTNEED);
    mprotect(first, end - first, PROT_NONE);
}
