/* Disk faults by LD_PRELOAD, for files whose path contains SOAK_DISK_PATH.
 *
 * SOAK_DISK_FAULT="CALL NTH HOW FOREVER": the NTH matching call (from 1; with FOREVER 1 also all later ones) of CALL
 * ("any", "write", "fsync", "rename", "make", "remove") fails with errno HOW > 0; HOW 0: a write stores half its bytes;
 * HOW -S: the call takes S seconds longer; HOW -1000: the process is killed at the call.
 * SOAK_DISK_JOURNAL=FILE: gets "w INODE" for every write and "s INODE SIZE" for every fsync: what a power cut would lose.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define HALF (-1)

static long count;

static int inside(const char *path) {
    const char *part = getenv("SOAK_DISK_PATH");
    return part && path && strstr(path, part) != NULL;
}

static int fd_inside(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return inside(path);
}

/* 0: go on; > 0: the errno to fail with; HALF: half a write. */
static int fault(const char *call) {
    const char *text = getenv("SOAK_DISK_FAULT");
    char kind[16];
    long nth, how, forever;
    if (!text || sscanf(text, "%15s %ld %ld %ld", kind, &nth, &how, &forever) != 4) return 0;
    if (strcmp(kind, "any") && strcmp(kind, call)) return 0;
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (forever ? now < nth : now != nth) return 0;
    if (how == -1000) kill(getpid(), SIGKILL);
    if (how < 0) sleep((unsigned)-how);
    return how > 0 ? (int)how : how == 0 && !strcmp(call, "write") ? HALF : 0;
}

static void note(int fd, char what) {
    const char *file = getenv("SOAK_DISK_JOURNAL");
    struct stat s;
    char line[64];
    if (!file || fstat(fd, &s)) return;
    int n = snprintf(line, sizeof line, "%c %lu %ld\n", what, (unsigned long)s.st_ino, (long)s.st_size);
    int out = REAL(open)(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (out < 0) return;
    if (REAL(write)(out, line, n) < 0) abort();
    close(out);
}

#define FAIL_IF(condition, call) \
    if (condition) { int e = fault(call); if (e > 0) { errno = e; return -1; } }

ssize_t write(int fd, const void *data, size_t size) {
    if (!fd_inside(fd)) return REAL(write)(fd, data, size);
    int e = fault("write");
    if (e > 0) { errno = e; return -1; }
    if (e == HALF && size > 1) size /= 2;
    ssize_t done = REAL(write)(fd, data, size);
    note(fd, 'w');
    return done;
}

int fsync(int fd) {
    int ours = fd_inside(fd);
    FAIL_IF(ours, "fsync")
    int result = REAL(fsync)(fd);
    if (ours && !result) note(fd, 's');
    return result;
}

int rename(const char *from, const char *to) {
    FAIL_IF(inside(from) || inside(to), "rename")
    return REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t mode) {
    FAIL_IF(inside(path), "make")
    return REAL(mkdir)(path, mode);
}

int link(const char *from, const char *to) {
    FAIL_IF(inside(to), "make")
    return REAL(link)(from, to);
}

int symlink(const char *to, const char *path) {
    FAIL_IF(inside(path), "make")
    return REAL(symlink)(to, path);
}

int unlink(const char *path) {
    FAIL_IF(inside(path), "remove")
    return REAL(unlink)(path);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    FAIL_IF((flags & O_CREAT) && inside(path), "make")
    return REAL(open64)(path, flags, mode);
}
