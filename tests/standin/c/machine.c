/* The machine: how many devices there are, which of them a process sees, who has contexts and memory on them.

   Processes of one machine share a table in the file "machine" of STANDIN_DIR. An entry counts as long as its process is
   there, so what a killed process had is free when the process has ended. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_HOLDERS 1024
#define CONTEXT_BYTES (512UL << 20) /* what a context costs on a device of today */

struct holder {
    _Atomic int pid; /* 0 for an entry that nobody has */
    int device;      /* physical */
    _Atomic size_t bytes;
};

static struct holder *holders;           /* of all processes */
static struct holder *own[MOST_DEVICES]; /* of this one, by visible device */
static int initialized_in;               /* the process that has initialized CUDA */
static int count, order[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 10) : otherwise;
}

void tell(const char *format, ...) {
    const char *path = getenv("STANDIN_LOG");
    if (!path) return;
    int kept = errno;
    char line[600];
    int length = snprintf(line, sizeof line, "%d ", getpid());
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - 1 - length, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (file >= 0) {
        UNUSED ssize_t written = write(file, line, length); /* one call: lines of several processes do not mix */
        close(file);
    }
    errno = kept;
}

const char *machine_directory(void) {
    static char path[300];
    if (!*path) {
        const char *given = getenv("STANDIN_DIR");
        if (given)
            snprintf(path, sizeof path, "%s", given);
        else
            snprintf(path, sizeof path, "/dev/shm/standin-%d", getuid());
        mkdir(path, 0700);
    }
    return path;
}

int physical_count(void) {
    long devices = setting("STANDIN_GPUS", 4);
    return devices < 0 ? 0 : devices > MOST_DEVICES ? MOST_DEVICES : (int)devices;
}

/* Devices of different machines differ, as who leases devices by UUID does so for all machines that are imitated here. */
void uuid_bytes(int device, unsigned char bytes[16]) {
    static const unsigned char like[16] = {0x5a, 0x5a, 0, 0, 0, 0, 0x40, 0, 0x80};
    memcpy(bytes, like, 16);
    unsigned long hash = 14695981039346656037UL; /* FNV-1a */
    for (const char *c = machine_directory(); *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211UL;
    memcpy(bytes + 10, &hash, 5);
    bytes[3] = bytes[15] = (unsigned char)(device + 1);
}

void uuid_text(int device, char *text, size_t size) {
    unsigned char b[16];
    uuid_bytes(device, b);
    snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
             b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* The device that an entry of the mask names: an index, or a UUID that may be cut short; -1 for none. */
static int named(const char *entry) {
    int devices = physical_count();
    if (!strncmp(entry, "GPU-", 4)) {
        int found = -1;
        for (int i = 0; i < devices; i++) {
            char text[64];
            uuid_text(i, text, sizeof text);
            if (!strncasecmp(text, entry, strlen(entry))) {
                if (found >= 0) return -1;
                found = i;
            }
        }
        return found;
    }
    char *end;
    long index = strtol(entry, &end, 10);
    return end == entry || index < 0 || index >= devices ? -1 : (int)index;
}

/* Read the mask as the driver does: what comes after an entry that names nothing is not visible either, and who names a
   device twice sees none. STANDIN_MASK is the variable that is honoured: a driver may know another than the code that
   sets it. */
static void read_mask(void) {
    const char *variable = getenv("STANDIN_MASK");
    const char *mask = getenv(variable ? variable : "CUDA_VISIBLE_DEVICES");
    count = 0;
    if (!mask) {
        for (int i = 0; i < physical_count(); i++) order[count++] = i;
        return;
    }
    char *copy = strdup(mask), *rest = copy, *entry;
    while ((entry = strsep(&rest, ","))) {
        while (*entry == ' ') entry++;
        int device = named(entry);
        if (device < 0 || count == MOST_DEVICES) break;
        for (int i = 0; i < count; i++)
            if (order[i] == device) {
                count = 0;
                free(copy);
                return;
            }
        order[count++] = device;
    }
    free(copy);
}

static void open_machine(void) {
    char path[400];
    snprintf(path, sizeof path, "%s/machine", machine_directory());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    size_t size = MOST_HOLDERS * sizeof(struct holder);
    if (file < 0 || ftruncate(file, size)) {
        fprintf(stderr, "stand-in: %s: %s\n", path, strerror(errno));
        abort();
    }
    holders = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
}

cudaError_t initialize(const char *caller) {
    long sick = setting("STANDIN_INIT_ERROR", 0);
    if (sick) {
        tell("init %s fails: %ld", caller, sick);
        return (cudaError_t)sick;
    }
    if (initialized_in == getpid()) return count ? cudaSuccess : cudaErrorNoDevice;
    if (initialized_in) {
        tell("USED AFTER FORK by %s", caller);
        return cudaErrorInitializationError;
    }
    pthread_mutex_lock(&lock);
    if (!initialized_in) {
        read_mask();
        open_machine();
        initialized_in = getpid();
        const char *mask = getenv("CUDA_VISIBLE_DEVICES");
        tell("init by %s, mask %s: %d devices", caller, mask ? mask : "(unset)", count);
    }
    pthread_mutex_unlock(&lock);
    return count ? cudaSuccess : cudaErrorNoDevice;
}

int visible_count(void) { return count; }

int physical(int device) { return order[device]; }

static bool alive(int pid) { return kill(pid, 0) == 0 || errno == EPERM; }

/* Whether another living process has a context there; forgets those of the dead. */
static int others_on(int device) {
    int others = 0;
    for (int i = 0; i < MOST_HOLDERS; i++) {
        int pid = holders[i].pid;
        if (!pid || pid == getpid()) continue;
        if (!alive(pid))
            atomic_compare_exchange_strong(&holders[i].pid, &pid, 0);
        else if (holders[i].device == device)
            others++;
    }
    return others;
}

bool has_context(int device) { return own[device] != NULL; }

static cudaError_t context_locked(int device) {
    int real = physical(device);
    if (real == setting("STANDIN_BROKEN", -1)) {
        tell("context on gpu %d refused: broken", real);
        return cudaErrorECCUncorrectable;
    }
    int others = others_on(real);
    if (setting("STANDIN_EXCLUSIVE", 0) && others) {
        tell("context on gpu %d refused: another process has one", real);
        return cudaErrorDevicesUnavailable;
    }
    if (free_memory(device) < CONTEXT_BYTES) {
        tell("context on gpu %d refused: no memory", real);
        return cudaErrorMemoryAllocation;
    }
    for (int i = 0; i < MOST_HOLDERS; i++) {
        int nobody = 0;
        if (atomic_compare_exchange_strong(&holders[i].pid, &nobody, getpid())) {
            holders[i].device = real;
            holders[i].bytes = CONTEXT_BYTES;
            own[device] = &holders[i];
            tell("context on gpu %d beside %d others", real, others);
            return cudaSuccess;
        }
    }
    return cudaErrorMemoryAllocation;
}

cudaError_t make_context(int device) {
    if (device < 0 || device >= count) return cudaErrorInvalidDevice;
    if (own[device]) return cudaSuccess;
    pthread_mutex_lock(&lock);
    cudaError_t error = own[device] ? cudaSuccess : context_locked(device);
    pthread_mutex_unlock(&lock);
    return error;
}

size_t total_memory(void) { return (size_t)setting("STANDIN_MEMORY", 80L << 30); }

size_t free_memory(int device) {
    size_t used = 0, total = total_memory();
    for (int i = 0; i < MOST_HOLDERS; i++) {
        int pid = holders[i].pid;
        if (pid && holders[i].device == physical(device) && alive(pid)) used += holders[i].bytes;
    }
    return used < total ? total - used : 0;
}

bool take_memory(int device, size_t bytes) {
    if (free_memory(device) < bytes) return false;
    own[device]->bytes += bytes;
    return true;
}

void return_memory(int device, size_t bytes) {
    if (own[device]) own[device]->bytes -= bytes;
}
