/* Preloaded by fence.py: torch's own allocations (it takes them by posix_memalign) end at an
   unmapped page and begin as a pattern; what lies around them on their pages is looked at when they
   are freed. Small ones take turns between fences that stay, and freed bytes are overwritten; large
   ones have addresses of their own, so that a late use is a fault. */
#define _GNU_SOURCE
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096UL
#define RANGE (1UL << 40)
#define LARGEST (64UL << 20)
#define AROUND 0x5c
#define FREED 0xee

#define MOST_PAGES 8
#define SLOTS 64 /* of each number of pages, used in turn: a late use finds the pattern gone */

static uint8_t *base;
static uint32_t *sizes; /* by the page an allocation begins on */
static uint64_t next_page;
static uint8_t *slots[MOST_PAGES + 1][SLOTS];
static uint8_t used[MOST_PAGES + 1][SLOTS];
static unsigned turn[MOST_PAGES + 1];
static volatile int lock, pattern = -1;

extern void __libc_free(void *);
extern void *__libc_memalign(size_t, size_t);

static void hold(void) {
    while (__sync_lock_test_and_set(&lock, 1)) {
    }
}

uint64_t fence_regions; /* made so far; each leaves a mapping behind, of which there are 65,530 */

static uint8_t *fresh(size_t pages) { /* between unmapped pages, with an address of its own */
    if ((next_page + pages + 2) * PAGE > RANGE) abort();
    uint8_t *first = base + (next_page + 1) * PAGE;
    next_page += pages + 1;
    fence_regions++;
    return mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE) ? 0 : first;
}

static void tell(int number, siginfo_t *info, void *context) { /* where, and from where */
    uint8_t *at = info->si_addr;
    void *frames[32];
    char text[160];
    (void)context;
    int in_fence = base && at >= base && at < base + RANGE;
    int size = snprintf(text, sizeof text, "fence: signal %d at %p, %s, page %ld + %ld\n", number,
                        (void *)at, in_fence ? "in an allocation's fence" : "elsewhere",
                        in_fence ? (long)((at - base) / PAGE) : 0, (long)((uintptr_t)at % PAGE));
    if (write(2, text, size) < 0) _exit(70);
    backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
    signal(number, SIG_DFL);
    raise(number);
}

void fence_pattern(int byte) {
    if (!base) {
        void *frames[1];
        backtrace(frames, 1); /* loads what it needs */
        struct sigaction action = {.sa_sigaction = tell, .sa_flags = SA_SIGINFO};
        sigaction(SIGSEGV, &action, 0);
        sigaction(SIGBUS, &action, 0);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        sizes = mmap(0, RANGE / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE, flags, -1, 0);
        uint8_t *found = mmap(0, RANGE, PROT_NONE, flags, -1, 0);
        if (found == MAP_FAILED || sizes == MAP_FAILED) abort();
        base = found;
        for (size_t pages = 1; pages <= MOST_PAGES; pages++)
            for (int slot = 0; slot < SLOTS; slot++)
                if (!(slots[pages][slot] = fresh(pages))) abort();
    }
    pattern = byte;
}

static uint8_t *taken(size_t pages) { /* a free slot, or none */
    for (int tries = 0; pages <= MOST_PAGES && tries < SLOTS; tries++) {
        unsigned slot = turn[pages]++ % SLOTS;
        if (!used[pages][slot]) {
            used[pages][slot] = 1;
            return slots[pages][slot];
        }
    }
    return 0;
}

static int given_back(uint8_t *first, size_t pages) {
    for (int slot = 0; pages <= MOST_PAGES && slot < SLOTS; slot++)
        if (slots[pages][slot] == first) {
            used[pages][slot] = 0;
            return 1;
        }
    return 0;
}

int posix_memalign(void **out, size_t align, size_t size) {
    if (pattern < 0 || size == 0 || size > LARGEST || align > PAGE) {
        *out = __libc_memalign(align, size);
        return *out ? 0 : ENOMEM;
    }
    size_t pages = (size + align + PAGE - 1) / PAGE;
    hold();
    uint8_t *first = taken(pages);
    if (!first) first = fresh(pages);
    __sync_lock_release(&lock);
    if (!first) abort(); /* too many mappings: not a finding, and not to be taken for one */
    uint8_t *end = first + pages * PAGE;
    uint8_t *start = (uint8_t *)((uintptr_t)(end - size) & ~(align - 1));
    memset(first, AROUND, start - first);
    memset(start, pattern, size);
    memset(start + size, AROUND, end - (start + size));
    sizes[(start - base) / PAGE] = size;
    *out = start;
    return 0;
}

static void look(const uint8_t *from, const uint8_t *until) {
    for (; from < until; from++)
        if (*from != AROUND) abort();
}

void free(void *address) {
    uint8_t *start = address;
    if (!base || start < base || start >= base + RANGE) {
        __libc_free(address);
        return;
    }
    size_t size = sizes[(start - base) / PAGE];
    uint8_t *end = (uint8_t *)(((uintptr_t)start + size + PAGE - 1) & ~(PAGE - 1));
    uint8_t *first = (uint8_t *)((uintptr_t)start & ~(PAGE - 1));
    look(first, start);
    look(start + size, end);
    hold();
    /* One that begins on its second page (an alignment) has one more before it. */
    int kept = given_back(first, (end - first) / PAGE) ||
               given_back(first - PAGE, (end - first) / PAGE + 1);
    __sync_lock_release(&lock);
    if (kept) {
        memset(start, FREED, size);
        return;
    }
    madvise(first, end - first, MADV_DONTNEED);
    mprotect(first, end - first, PROT_NONE);
}
